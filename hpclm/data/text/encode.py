"""Encode a chunk of text as tokens of a dataset; runs in worker processes."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpclm.data import tokenizers
from hpclm.data.disk.indexed import token_dtype
from hpclm.data.text.inputs import Chunk
from hpclm.errors import ConfigError

DIGEST = 16  # bytes of a document's hash
SHOWN = 5  # unreadable lines of a chunk that are described
SPACE = re.compile(r"\s*")
JSON = {
    int: "a number",
    float: "a number",
    bool: "a truth value",
    type(None): "null",
    list: "a list",
    dict: "an object",
}

OnError = Literal["stop", "skip"]


@dataclass(frozen=True)
class Job:
    """Everything that determines the tokens of a text; the same in every process."""

    tokenizer: str
    files: tuple[str, ...]
    options: tokenizers.Options = field(default_factory=tokenizers.Options)
    keys: tuple[str, ...] = ("text",)
    """Keys of the texts in a JSON object; each becomes a dataset."""
    append_eod: bool = False
    empty: Literal["skip", "keep", "error"] = "skip"
    """What to do with documents without tokens."""
    on_error: OnError = "stop"
    """What to do with unreadable lines."""
    language: str | None = None
    """Split documents into sentences of this language."""
    keep_newlines: bool = False
    """Keep the white space after sentences."""
    deduplicate: bool = False
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
    digests: NDArray[np.void] | None = None
    """[k] hashes of the documents' texts, for deduplication."""
    empty: int = 0
    """Number of documents without tokens, kept or not."""
    unsplit: int = 0
    """Number of documents that could not be split into sentences."""


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

    chunk: Chunk
    """The chunk, without its text."""
    columns: tuple[Column, ...]
    """One for each key."""
    records: int
    """Number of lines, JSON objects or files that were read."""
    bad: dict[str, int] = field(default_factory=dict)
    """Number of unreadable lines, by reason."""
    problems: tuple[Problem, ...] = ()
    """The first unreadable lines."""


@cache
def tokenizer_of(job: Job) -> tokenizers.Tokenizer:
    """The tokenizer of a job, built once per process."""
    return tokenizers.build(job.tokenizer, list(job.files), job.options)


def encode(chunk: Chunk, job: Job) -> Encoded:
    """Encode a chunk, whose text is discarded; ConfigError, with file and line, if that fails."""
    texts, problems = read(chunk, job.keys, job.on_error)
    if job.empty != "error":
        chunk.text.clear()  # it may be gigabytes
    columns = tuple(_column(found, job, chunk, key) for key, found in enumerate(texts))
    bad: dict[str, int] = {}
    for problem in problems:
        bad[problem.reason] = bad.get(problem.reason, 0) + 1
    return Encoded(replace(chunk, text=bytearray()), columns, len(texts[0]), bad, tuple(problems[:SHOWN]))


def read(chunk: Chunk, keys: tuple[str, ...], on_error: OnError) -> tuple[list[list[str]], list[Problem]]:
    """The texts of a chunk, a list for each key, and its unreadable lines; ConfigError for those if ``on_error`` is "stop"."""
    texts = _read_quickly(chunk, keys)
    if texts is not None:
        return texts, []
    texts, problems = [[] for _ in keys], []
    for _, found in read_carefully(chunk, keys):
        if isinstance(found, Problem):
            if on_error == "stop":
                raise ConfigError(f"{chunk.where(found.line)}{found.message}")
            problems.append(found)
        else:
            for column, text in zip(texts, found, strict=True):
                column.append(text)
    return texts, problems


def _read_quickly(chunk: Chunk, keys: tuple[str, ...]) -> list[list[str]] | None:
    """The same texts as ``read_carefully``; None if any line needs that."""
    if chunk.source.format != "jsonl":
        try:
            text = chunk.text.decode()
        except UnicodeDecodeError:
            return None
        if chunk.source.format == "files":
            return [[text] for _ in keys]
        lines = text.split("\n")
        if not lines[-1]:
            del lines[-1]
        lines = [line.rstrip("\r") for line in lines]
        return [lines for _ in keys]

    from orjson import JSONDecodeError, loads

    several = chunk.text.find(b"\n", 0, -1) >= 0
    records: list[Any] = bytes(chunk.text).split(b"\n") if several else [chunk.text]  # a long line is not copied
    if not records[-1]:
        del records[-1]
    texts: list[list[str]] = [[] for _ in keys]
    try:
        if len(keys) == 1:
            [key] = keys
            texts = [[loads(record)[key] for record in records]]
        else:
            for record in map(loads, records):
                for column, key in zip(texts, keys, strict=True):
                    column.append(record[key])
    except (JSONDecodeError, KeyError, TypeError, IndexError):
        return None
    return texts if all(type(text) is str for column in texts for text in column) else None


def read_carefully(chunk: Chunk, keys: tuple[str, ...]) -> Iterator[tuple[int, list[str] | Problem]]:
    """(line number, its texts or what is wrong with it); accepts the JSON that Python's json does, and skips blank lines of JSONL."""
    single = chunk.source.format == "files"
    raws = [bytes(chunk.text)] if single else bytes(chunk.text).split(b"\n")
    if not single and not raws[-1]:
        del raws[-1]
    for number, raw in enumerate(raws):
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            message = f" is not UTF-8: byte {raw[error.start]:#x} at {error.start}; convert it, for example with iconv"
            yield number, Problem(number, "not UTF-8", message)
            continue
        if single:
            yield number, [line for _ in keys]
        elif chunk.source.format == "lines":
            yield number, [line.rstrip("\r") for _ in keys]
        elif line.strip():
            yield number, _texts(line, keys, number)


def _texts(line: str, keys: tuple[str, ...], number: int) -> list[str] | Problem:
    try:
        record = json.loads(line, parse_int=lambda _: 0)  # Python refuses very long numbers
    except (ValueError, RecursionError) as error:
        return Problem(number, "not JSON", f" is not JSON: {error}; a .jsonl file has one JSON object per line")
    if not isinstance(record, dict):
        what = f" holds a JSON {type(record).__name__}, not an object with the key {keys[0]!r}"
        return Problem(number, "not an object", what)
    texts: list[Any] = []
    for key in keys:
        if key not in record:
            return Problem(
                number, "no key", f" has no key {key!r}; it has {sorted(record)}; select one with --json-keys"
            )
        text = record[key]
        if not isinstance(text, str):
            return Problem(number, "not text", f": {key!r} holds {JSON[type(text)]}, not text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f": {key!r} holds half a character (a lone surrogate) at {error.start}"
            return Problem(number, "half a character", what)
        texts.append(text)
    return texts


def _column(texts: list[str], job: Job, chunk: Chunk, key: int) -> Column:
    """Encode ``texts``, one for each document."""
    tokenizer = tokenizer_of(job)
    unsplit = 0
    pieces, of = texts, np.ones(len(texts), np.int64)
    if job.language is not None:
        pieces, of, unsplit = _split(texts, job)
    ids, counts = tokenizer.encode_batch(pieces)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.size:
        raise ConfigError(
            f"the {job.tokenizer} tokenizer returned ids {ids.min()} to {ids.max()} in {chunk.source.name}, "
            f"but its size is {tokenizer.size}"
        )
    ids = ids.astype(token_dtype(tokenizer.size), copy=False)
    bounds = np.concatenate(([0], np.cumsum(of)))
    filled = np.concatenate(([0], np.cumsum(counts > 0)))
    documents = np.diff(filled[bounds])
    sizes = counts[counts > 0]
    full = documents > 0
    empty = len(full) - int(np.count_nonzero(full))
    if empty and job.empty == "error":
        records = [line for line, found in read_carefully(chunk, job.keys) if not isinstance(found, Problem)]
        what = f" in {job.keys[key]!r}" if chunk.source.format == "jsonl" else ""
        raise ConfigError(
            f"{chunk.where(records[int(np.argmin(full))])} has no tokens{what}; give --empty skip or --empty keep to allow that"
        )
    digests = None
    if job.deduplicate:
        found = b"".join(blake2b(text.encode(), digest_size=DIGEST).digest() for text in texts)
        digests = np.frombuffer(found, f"V{DIGEST}")
    if empty and job.empty == "skip":
        documents = documents[full]
        digests = digests[full] if digests is not None else None
    if job.append_eod and len(sizes):
        last = np.cumsum(documents)[documents > 0] - 1
        ids = np.insert(ids, np.cumsum(sizes)[last], tokenizers.end(tokenizer))
        sizes[last] += 1
    return Column(ids, sizes, documents, digests, empty, unsplit)


def _split(texts: list[str], job: Job) -> tuple[list[str], NDArray[np.int64], int]:
    """All sentences, the number in each text, and the number of texts that could not be split."""
    pieces: list[str] = []
    of = np.empty(len(texts), np.int64)
    unsplit = 0
    for i, text in enumerate(texts):
        found = sentences(text, job.language or "")
        if found is None:
            unsplit += 1
            found = [text]
        pieces += found if job.keep_newlines else (sentence.rstrip() for sentence in found)
        of[i] = len(found)
    return pieces, of, unsplit


def sentences(text: str, language: str) -> list[str] | None:
    """The sentences of ``text``, each with the white space after it; None if the library has changed the text."""
    from sentencex import segment

    found: list[str] = []
    for piece in segment(language, text):
        lead = SPACE.match(piece)
        space = len(lead[0]) if lead and found else 0  # white space belongs to the previous sentence
        if space:
            found[-1] += piece[:space]
        if piece[space:]:
            found.append(piece[space:])
    return found if "".join(found) == text else None
