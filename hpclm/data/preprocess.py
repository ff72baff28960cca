"""Turn text into a dataset: ``hpclm preprocess``, known to Megatron's users as tools/preprocess_data.py."""

import argparse
import json
import multiprocessing
import os
import shlex
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from hpclm.data import tokenizers
from hpclm.data.indexed import files, token_dtype
from hpclm.data.writer import Writer
from hpclm.errors import ConfigError, HpclmError
from hpclm.files import readable, writable_folder

CHUNK = 1 << 19  # bytes of input that a worker gets at a time
MEGATRON_TYPES = {"GPT2BPETokenizer": "gpt2"}


@dataclass(frozen=True)
class Chunk:
    """Some whole lines of one file, or with format "files" all of it."""

    path: str
    format: str
    first: int
    """Number of the first line, from 1."""
    lines: list[bytes]


@dataclass(frozen=True)
class Job:
    """How to turn a chunk into tokens; the same in every worker."""

    tokenizer: str
    files: tuple[str, ...]
    key: str
    append_eod: bool


@dataclass(frozen=True)
class Encoded:
    """What became of a chunk."""

    documents: list[list[int]]
    skipped: int
    """Documents without a token."""
    consumed: int
    """Bytes of input."""


def main(argv: list[str]) -> int:
    """``hpclm preprocess``: read the arguments, write the dataset, say what to type next."""
    args = _arguments(argv)
    inputs = [(str(readable(path, "input")), args.format or guess(path)) for path in args.input]
    if args.json_key and not any(format == "jsonl" for _, format in inputs):
        raise ConfigError(f"--json-key {args.json_key} has no effect: no input is JSONL")
    key = args.json_key or "text"
    prefix = Path(f"{args.output_prefix}_{key}_document")
    there = [str(path) for path in files(prefix)[:2] if path.exists()]
    if there and not args.overwrite:
        raise ConfigError(f"{' and '.join(there)} exists; give --overwrite to replace it, or another --output-prefix")
    job = Job(args.tokenizer, tuple(args.tokenizer_files), key, args.append_eod)
    tokenizer = _check(job)
    writable_folder(prefix.parent, "output folder")

    began, size = time.monotonic(), sum(Path(path).stat().st_size for path, _ in inputs)
    try:
        documents, tokens, skipped = write(prefix, inputs, job, args.workers, size)
    except OSError as error:
        raise ConfigError(f"{error.filename or prefix}: {error.strerror}; no dataset was written") from error
    seconds = time.monotonic() - began
    print(
        f"{prefix}.bin, .idx, .json: {documents:,} documents, {tokens:,} tokens; {skipped:,} empty documents skipped; "
        f"{size / 1e6 / seconds:.1f} MB/s"
    )
    print("next: hpclm train gpt2-124m", end=" ")
    print(f"data.prefix={shlex.quote(str(prefix))} model.vocab_size={tokenizer.size}")
    return 0


def write(prefix: Path, inputs: list[tuple[str, str]], job: Job, workers: int, size: int) -> tuple[int, int, int]:
    """Write the dataset of ``inputs``, (path, format) pairs of ``size`` bytes; returns documents, tokens, skipped.

    The dataset is the same for any number of workers, and memory does not grow with the input.
    """
    from tqdm import tqdm

    tokenizer = _tokenizer(job)
    skipped = 0
    with (
        Writer(prefix, token_dtype(tokenizer.size)) as writer,
        closing(encoded(chunks(inputs), job, workers)) as stream,
        tqdm(total=size, unit="B", unit_scale=True, disable=None, desc=prefix.name) as bar,
    ):
        for part in stream:
            for document in part.documents:
                writer.add_document(document)
            skipped += part.skipped
            bar.update(part.consumed)
        if not writer.documents:
            names = ", ".join(path for path, _ in inputs)
            raise ConfigError(f"no documents in {names} ({skipped} empty ones); no dataset was written")
        writer.note = {
            "tokenizer": tokenizer.identity,
            "tokenizer_files": [str(Path(file).absolute()) for file in job.files],
            "documents": writer.documents,
            "tokens": writer.tokens,
            "skipped": skipped,
        }
    return writer.documents, writer.tokens, skipped


def guess(path: str | Path) -> str:
    """The format that a file's name suggests: jsonl for .jsonl and .json, else lines."""
    return "jsonl" if Path(path).suffix in (".jsonl", ".json") else "lines"


def chunks(inputs: list[tuple[str, str]]) -> Iterator[Chunk]:
    """The inputs in order, a few lines at a time."""
    for path, format in inputs:
        with open(path, "rb") as file:
            if format == "files":
                yield Chunk(path, format, 1, [file.read()])
                continue
            first = 1
            while lines := file.readlines(CHUNK):
                yield Chunk(path, format, first, lines)
                first += len(lines)


def texts(chunk: Chunk, key: str) -> Iterator[str]:
    """The documents of a chunk; ConfigError names file and line of one that cannot be read."""
    for number, raw in enumerate(chunk.lines, chunk.first):
        where = chunk.path if chunk.format == "files" else f"{chunk.path}:{number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{where} is not UTF-8: byte {raw[error.start]:#x} at {error.start}; convert it, for example with iconv"
            ) from None
        if chunk.format == "files":
            yield line
        elif chunk.format == "lines":
            yield line.rstrip("\r\n")
        elif line.strip():  # a blank line in a JSONL file is no document
            yield _text(line, key, where)


def encoded(chunks: Iterator[Chunk], job: Job, workers: int) -> Generator[Encoded, None, None]:
    """What becomes of the chunks, in their order; at most a few chunks per worker are held at a time."""
    if workers == 1:
        yield from (encode(chunk, job) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
    try:
        running: deque[Future[Encoded]] = deque()
        for chunk in chunks:
            running.append(pool.submit(encode, chunk, job))
            if len(running) > 2 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BrokenProcessPool as error:
        raise HpclmError(
            "a worker was killed, most likely for memory; try fewer --workers, no dataset was written"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def encode(chunk: Chunk, job: Job) -> Encoded:
    """The tokens of a chunk's documents."""
    tokenizer = _tokenizer(job)
    ids, lengths = tokenizer.encode_batch(list(texts(chunk, job.key)))
    found = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(lengths) else []
    documents = [ids for ids in found if ids]
    if job.append_eod and tokenizer.eod is not None:
        for ids in documents:
            ids.append(tokenizer.eod)
    return Encoded(documents, len(found) - len(documents), sum(map(len, chunk.lines)))


@cache
def _tokenizer(job: Job) -> tokenizers.Tokenizer:
    return tokenizers.build(job.tokenizer, list(job.files))


def _check(job: Job) -> tokenizers.Tokenizer:
    """The job's tokenizer, after what it and --append-eod cannot do together."""
    tokenizer = _tokenizer(job)
    if job.append_eod:
        tokenizers.end(tokenizer)
    if job.append_eod and tokenizer.ends_itself:
        raise ConfigError(f"the {job.tokenizer} tokenizer ends every document by itself; leave out --append-eod")
    return tokenizer


def _text(line: str, key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}; a .jsonl file has one JSON object in each line") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} holds a JSON {type(record).__name__}, not an object with the key {key!r}")
    if key not in record:
        raise ConfigError(f"{where} has no key {key!r}; it has {sorted(record)}: name one with --json-key")
    text = record[key]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {key!r} holds a {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: {key!r} holds half a character (a lone surrogate) at {error.start}") from None
    return text


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpclm preprocess", description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="UTF-8 text or JSONL")
    parser.add_argument(
        "--format",
        choices=["jsonl", "lines", "files"],
        help="a document is a JSON object per line, a line, or a whole file; default: jsonl for .jsonl and .json, else lines",
    )
    parser.add_argument(
        "--json-key", "--json-keys", metavar="KEY", help="where a JSON object has its text; default: text"
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="P", help="writes P_text_document.bin, .idx and .json (text: the key)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="KIND",
        help="bytes, fairseq, gpt2, json, sentencepiece, whitespace, wordpiece, wordpiece_lower, or package.module:Name",
    )
    parser.add_argument("--tokenizer-files", nargs="+", default=[], metavar="FILE", help="in the kind's order")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that encode, one core each; default: 1"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset of that name")
    megatron = parser.add_argument_group("Megatron's names")
    megatron.add_argument("--tokenizer-type", choices=list(MEGATRON_TYPES), help="GPT2BPETokenizer is --tokenizer gpt2")
    megatron.add_argument("--vocab-file", "--vocab", metavar="FILE", help="GPT-2's vocab.json")
    megatron.add_argument("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    megatron.add_argument("--dataset-impl", choices=["mmap"], help="the only layout there is")
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers {args.workers} must be at least 1")
    if args.tokenizer_type:
        if args.tokenizer or args.tokenizer_files:
            parser.error("--tokenizer-type excludes --tokenizer and --tokenizer-files")
        args.tokenizer = MEGATRON_TYPES[args.tokenizer_type]
        args.tokenizer_files = [file for file in (args.vocab_file, args.merge_file) if file]
    elif args.vocab_file or args.merge_file:
        parser.error("--vocab-file and --merge-file go with --tokenizer-type; or give --tokenizer-files")
    elif not args.tokenizer:
        parser.error("give --tokenizer KIND and --tokenizer-files FILE...")
    return args
