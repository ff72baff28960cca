"""What a worker does: some lines of text become tokens of a dataset, in the type that the dataset stores."""

import json
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
SHOWN = 5  # bad lines of a chunk that are described

OnError = Literal["stop", "skip"]


@dataclass(frozen=True)
class Job:
    """All that decides what a text becomes; the same in every worker and every process."""

    tokenizer: str
    files: tuple[str, ...]
    options: tokenizers.Options = field(default_factory=tokenizers.Options)
    keys: tuple[str, ...] = ("text",)
    """Where a JSON object has its texts; one dataset for each."""
    append_eod: bool = False
    empty: Literal["skip", "keep", "error"] = "skip"
    """What to do with a document without a token."""
    on_error: OnError = "stop"
    """What to do with a line that cannot be read."""
    language: str | None = None
    """Split documents into this language's sentences."""
    keep_newlines: bool = False
    """Sentences keep the white space after them."""
    deduplicate: bool = False
    layout: Literal["megatron", "fairseq"] = "megatron"


@dataclass(frozen=True)
class Column:
    """What became of one key's documents."""

    tokens: NDArray
    """[t] in the dataset's type, all sequences laid end to end."""
    sizes: NDArray[np.int64]
    """[s] tokens of each sequence."""
    documents: NDArray[np.int64]
    """[k] sequences of each document."""
    digests: NDArray[np.void] | None = None
    """[k] hashes of the documents' texts, where they are asked for."""
    empty: int = 0
    """Documents without a token, whether they were kept or not."""
    unsplit: int = 0
    """Documents that are one sequence because their sentences could not be told apart."""


@dataclass(frozen=True)
class Problem:
    """A line that cannot be read."""

    line: int
    """From 0, in its chunk."""
    reason: str
    """What is counted."""
    message: str
    """What follows the file's name and the line's number."""


@dataclass(frozen=True)
class Encoded:
    """What became of a chunk."""

    chunk: Chunk
    """Without its text."""
    columns: tuple[Column, ...]
    """One for each key."""
    records: int
    """Lines, JSON objects or files that were read well."""
    bad: dict[str, int] = field(default_factory=dict)
    """How many lines could not be read, by reason."""
    problems: tuple[Problem, ...] = ()
    """The first of them."""


@cache
def tokenizer_of(job: Job) -> tokenizers.Tokenizer:
    """The job's tokenizer, built once in each process."""
    return tokenizers.build(job.tokenizer, list(job.files), job.options)


def encode(chunk: Chunk, job: Job) -> Encoded:
    """The tokens of a chunk's documents; its text is used up. ConfigError names file and line of what cannot be."""
    texts, problems = read(chunk, job.keys, job.on_error)
    if job.empty != "error":
        chunk.text.clear()  # a line of gigabytes need not be held beside its tokens
    columns = tuple(_column(found, job, chunk, key) for key, found in enumerate(texts))
    bad: dict[str, int] = {}
    for problem in problems:
        bad[problem.reason] = bad.get(problem.reason, 0) + 1
    return Encoded(replace(chunk, text=bytearray()), columns, len(texts[0]), bad, tuple(problems[:SHOWN]))


def read(chunk: Chunk, keys: tuple[str, ...], on_error: OnError) -> tuple[list[list[str]], list[Problem]]:
    """The texts of a chunk, a list for each key, and what cannot be read; with "stop" that is a ConfigError."""
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
    """What ``read_carefully`` finds, or None where a line is anything but usual."""
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
    """(line, its texts or what is wrong with it); JSON is what Python's json accepts. A blank line of JSONL is nothing."""
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
        record = json.loads(line, parse_int=lambda _: 0)  # numbers are not looked at; Python refuses very long ones
    except (ValueError, RecursionError) as error:
        return Problem(number, "not JSON", f" is not JSON: {error}; a .jsonl file has one JSON object in each line")
    if not isinstance(record, dict):
        what = f" holds a JSON {type(record).__name__}, not an object with the key {keys[0]!r}"
        return Problem(number, "not an object", what)
    texts: list[Any] = []
    for key in keys:
        if key not in record:
            return Problem(number, "no key", f" has no key {key!r}; it has {sorted(record)}: name one with --json-keys")
        text = record[key]
        if not isinstance(text, str):
            return Problem(number, "not text", f": {key!r} holds a {type(text).__name__}, not text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f": {key!r} holds half a character (a lone surrogate) at {error.start}"
            return Problem(number, "half a character", what)
        texts.append(text)
    return texts


def _column(texts: list[str], job: Job, chunk: Chunk, key: int) -> Column:
    """The tokens of ``texts``, one for each document."""
    tokenizer = tokenizer_of(job)
    unsplit = 0
    pieces, of = texts, np.ones(len(texts), np.int64)
    if job.language is not None:
        pieces, of, unsplit = _split(texts, job)
    ids, counts = tokenizer.encode_batch(pieces)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.size:
        raise ConfigError(
            f"the {job.tokenizer} tokenizer gave ids {ids.min()} to {ids.max()} in {chunk.source.name}, "
            f"but says that it has {tokenizer.size} entries"
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
            f"{chunk.where(records[int(np.argmin(full))])} has no token{what}; --empty skip or --empty keep goes on"
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
    """All sentences, how many each text has, and how many texts were left whole."""
    from hpclm.data.text.sentences import sentences

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
