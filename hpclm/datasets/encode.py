"""Encode a chunk of text as tokens of a dataset; runs in worker processes."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

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


class Column(NamedTuple):
    """The encoded documents of one key."""

    tokens: NDArray
    """[t] all sequences, concatenated, in the dataset's type."""
    sizes: NDArray[np.int64]
    """[s] tokens in each sequence."""
    documents: NDArray[np.int64]
    """[k] sequences in each document."""
    empty: int = 0
    """Number of documents without tokens, kept or not."""


class Encoded(NamedTuple):
    """An encoded chunk."""

    columns: list[Column]
    """One for each key."""
    consumed: int
    """As in the chunk."""
    bad: Counter[str]
    """Number of unreadable lines, by reason."""
    described: list[str]
    """The first unreadable lines: where they are, and what is wrong with them."""


class UnreadableLineError(Exception):
    """What is wrong with a line: a ``reason`` for counting, and a message to follow file name and line number."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@cache
def tokenizer_of(job: Job) -> tokenizers.Tokenizer:
    """The tokenizer of a job, built once per process."""
    return tokenizers.build(job.tokenizer, list(job.files), job.eod)


def encode(chunk: InputChunk, job: Job) -> Encoded:
    """Encode a chunk, whose text is discarded; ConfigError, with file and line, if that fails."""
    texts, errors = read_texts(chunk, job.keys, job.on_error)
    described = [f"{chunk.location(number)}{error}" for number, error in errors[:SHOWN]]
    chunk.lines.clear()  # they may be gigabytes
    columns = [_column(documents, job, chunk.source.name) for documents in texts]
    return Encoded(columns, chunk.consumed, Counter(error.reason for _, error in errors), described)


def read_texts(
    chunk: InputChunk, keys: tuple[str, ...], on_error: OnError = "stop"
) -> tuple[list[list[str]], list[tuple[int, UnreadableLineError]]]:
    """The texts of a chunk, a list for each key, and its unreadable lines; ConfigError for those if ``on_error`` is "stop"."""
    texts: list[list[str]] = [[] for _ in keys]
    errors = []
    for number, line in enumerate(chunk.lines):
        try:
            record = read_line(line, chunk.source.format, keys)
        except UnreadableLineError as error:
            if on_error == "stop":
                raise ConfigError(f"{chunk.location(number)}{error}") from None
            errors.append((number, error))
            continue
        for column, text in zip(texts, record, strict=False):  # a blank line has none
            column.append(text)
    return texts, errors


def read_line(line: bytes, format: Format, keys: tuple[str, ...]) -> list[str]:
    """The texts of a line, none for a blank line of JSONL; takes the JSON that Python's json takes. UnreadableLineError."""
    if format != "jsonl":
        text = _decoded(line)
        return [text.removesuffix("\n").rstrip("\r") if format == "lines" else text] * len(keys)
    lenient = False
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        text, lenient = _decoded(line), True
        if not text.strip():
            return []
        try:
            record = json.loads(text, parse_int=lambda _: 0)  # Python refuses very long numbers
        except (ValueError, RecursionError) as error:
            message = f" is not JSON: {error}; a .jsonl file has one JSON object per line"
            raise UnreadableLineError("not JSON", message) from None
    if not isinstance(record, dict):
        message = f" holds a JSON {type(record).__name__}, not an object with the key {keys[0]!r}"
        raise UnreadableLineError("not an object", message)
    texts = []
    for key in keys:
        if key not in record:
            message = f" has no key {key!r}; it has {sorted(record)}; select one with --json-keys"
            raise UnreadableLineError("no key", message)
        text = record[key]
        if not isinstance(text, str):
            raise UnreadableLineError("not text", f": {key!r} holds a JSON {type(text).__name__}, not text")
        try:
            texts.append(text.encode().decode() if lenient else text)
        except UnicodeEncodeError:
            raise UnreadableLineError(
                "half a character", f": {key!r} holds half a character (a lone surrogate)"
            ) from None
    return texts


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        message = f" is not UTF-8: byte {line[error.start]:#x} at {error.start}; convert it, for example with iconv"
        raise UnreadableLineError("not UTF-8", message) from None


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
