"""Encode a chunk of text as tokens of a dataset; runs in worker processes."""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from hpclm.data import tokenizers
from hpclm.data.indexed import token_dtype
from hpclm.datasets.inputs import Format, InputChunk
from hpclm.errors import ConfigError

SHOWN = 5  # unreadable lines of a chunk that are described
OnError = Literal["stop", "skip"]


@dataclass(frozen=True)
class Job:
    """Everything that determines the tokens of a text; the same in every process."""

    tokenizer: str
    files: tuple[str, ...]
    eod: str | None = None
    """Text of the end-of-document token; None: the tokenizer's own."""
    keys: tuple[str, ...] = ("text",)
    """Keys of the texts in a JSON object; each becomes a dataset."""
    append_eod: bool = False
    empty: Literal["skip", "keep"] = "skip"
    """What to do with documents without tokens."""
    on_error: OnError = "stop"
    """What to do with unreadable lines."""
    language: str | None = None
    """Split documents into sentences of this language."""
    keep_newlines: bool = False
    """Keep the white space after sentences."""
    layout: Literal["megatron", "fairseq"] = "megatron"


@dataclass(frozen=True)
class Column:
    """The encoded documents of one key."""

    tokens: NDArray
    """[t] all sequences, concatenated, in the dataset's type."""
    sizes: NDArray[np.int64]
    """[s] tokens in each sequence."""
    documents: NDArray[np.int64]
    """[k] sequences in each document."""
    empty: int = 0
    """Number of documents without tokens, kept or not."""


@dataclass(frozen=True)
class Problem:
    """An unreadable line."""

    line: int
    """Its number in the chunk, from 0."""
    reason: str
    """Category, for counting."""
    message: str
    """Description, to follow file name and line number."""


@dataclass(frozen=True)
class Encoded:
    """An encoded chunk."""

    chunk: InputChunk
    """The chunk, without its text."""
    columns: tuple[Column, ...]
    """One for each key."""
    bad: dict[str, int] = field(default_factory=dict)
    """Number of unreadable lines, by reason."""
    problems: tuple[Problem, ...] = ()
    """The first unreadable lines."""


@cache
def tokenizer_of(job: Job) -> tokenizers.Tokenizer:
    """The tokenizer of a job, built once per process."""
    return tokenizers.build(job.tokenizer, list(job.files), job.eod)


def encode(chunk: InputChunk, job: Job) -> Encoded:
    """Encode a chunk, whose text is discarded; ConfigError, with file and line, if that fails."""
    texts, problems = read_texts(chunk, job.keys, job.on_error)
    chunk.text.clear()  # it may be gigabytes
    columns = tuple(_column(documents, job, chunk.source.name) for documents in texts)
    bad = Counter(problem.reason for problem in problems)
    return Encoded(replace(chunk, text=bytearray()), columns, dict(bad), tuple(problems[:SHOWN]))


def read_texts(chunk: InputChunk, keys: tuple[str, ...], on_error: OnError) -> tuple[list[list[str]], list[Problem]]:
    """The texts of a chunk, a list for each key, and its unreadable lines; ConfigError for those if ``on_error`` is "stop"."""
    texts: list[list[str]] = [[] for _ in keys]
    problems = []
    format = chunk.source.format
    lines = [chunk.text] if format == "files" else chunk.text.split(b"\n")
    if format != "files" and not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines):
        record = (_json_texts(line, keys) if format == "jsonl" else None) or read_line(line, format, keys, number)
        if not isinstance(record, Problem):
            for column, text in zip(texts, record, strict=False):  # a blank line has none
                column.append(text)
        elif on_error == "stop":
            raise ConfigError(f"{chunk.location(number)}{record.message}")
        else:
            problems.append(record)
    return texts, problems


def _json_texts(line: bytes | bytearray, keys: tuple[str, ...]) -> list[str] | None:
    """What ``read_line`` returns, faster; None for a line that it must look at."""
    try:
        record = orjson.loads(line)
        texts = [record[key] for key in keys]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return texts if all(type(text) is str for text in texts) else None


def read_line(line: bytes | bytearray, format: Format, keys: tuple[str, ...], number: int) -> list[str] | Problem:
    """The texts of a line (none for a blank line of JSONL), or what is wrong with it; takes the JSON that Python's json takes."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        message = f" is not UTF-8: byte {line[error.start]:#x} at {error.start}; convert it, for example with iconv"
        return Problem(number, "not UTF-8", message)
    if format != "jsonl":
        return [text.rstrip("\r") if format == "lines" else text] * len(keys)
    if not text.strip():
        return []
    try:
        record = json.loads(text, parse_int=lambda _: 0)  # Python refuses very long numbers
    except (ValueError, RecursionError) as error:
        return Problem(number, "not JSON", f" is not JSON: {error}; a .jsonl file has one JSON object per line")
    if not isinstance(record, dict):
        message = f" holds a JSON {type(record).__name__}, not an object with the key {keys[0]!r}"
        return Problem(number, "not an object", message)
    for key in keys:
        if key not in record:
            message = f" has no key {key!r}; it has {sorted(record)}; select one with --json-keys"
            return Problem(number, "no key", message)
        if not isinstance(record[key], str):
            return Problem(number, "not text", f": {key!r} holds a JSON {type(record[key]).__name__}, not text")
        try:
            record[key].encode()
        except UnicodeEncodeError as error:
            message = f": {key!r} holds half a character (a lone surrogate) at {error.start}"
            return Problem(number, "half a character", message)
    return [record[key] for key in keys]


def _column(texts: list[str], job: Job, name: str) -> Column:
    """Encode ``texts``, one for each document, from the input ``name``."""
    tokenizer = tokenizer_of(job)
    sequences, per_document = texts, np.ones(len(texts), np.int64)
    if job.language is not None:
        split = [sentences(text, job.language) for text in texts]
        sequences = [sentence if job.keep_newlines else sentence.rstrip() for parts in split for sentence in parts]
        per_document = np.fromiter(map(len, split), np.int64, len(split))
    ids, sizes = tokenizer.encode_batch(sequences)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.size:
        raise ConfigError(
            f"the {job.tokenizer} tokenizer returned ids {ids.min()} to {ids.max()} in {name}, but its size is {tokenizer.size}"
        )
    ids = ids.astype(token_dtype(tokenizer.size), copy=False)
    bounds = np.concatenate(([0], np.cumsum(per_document)))
    documents = np.diff(np.concatenate(([0], np.cumsum(sizes > 0)))[bounds])  # sequences with tokens
    sizes = sizes[sizes > 0]
    full = documents > 0
    if job.empty == "skip":
        documents = documents[full]
    if job.append_eod and len(sizes):
        last = np.cumsum(documents)[documents > 0] - 1
        ids = np.insert(ids, np.cumsum(sizes)[last], tokenizers.end(tokenizer))
        sizes[last] += 1
    return Column(ids, sizes, documents, int(np.count_nonzero(~full)))


def sentences(text: str, language: str) -> list[str]:
    """The sentences of ``text``, each with the white space after it; at least one."""
    from sentencex import get_sentence_boundaries

    starts = []
    for boundary in get_sentence_boundaries(language, text):
        piece = text[boundary["start_index"] : boundary["end_index"]]
        if piece.strip():
            starts.append(boundary["end_index"] - len(piece.lstrip()))
    bounds = [0, *starts[1:], len(text)]
    return [text[begin:end] for begin, end in pairwise(bounds)]
