"""Train a tokenizer: a byte-level BPE (tokenizer.json), or a sentencepiece .model."""

import argparse
import logging
import random
import shlex
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

from hpclm import log as logs
from hpclm.data import tokenizers
from hpclm.data.text.encode import OnError, read
from hpclm.data.text.inputs import LONGEST, MB, Chunk, chunks, find
from hpclm.data.text.options import LONGEST_LINE
from hpclm.data.text.pool import exit_on_signals
from hpclm.errors import ConfigError
from hpclm.files import writable_folder, write_bytes
from hpclm.terminal import ArgumentParser, say

log = logging.getLogger(__name__)
MEASURED = 1000  # random documents for measuring the compression
LONG = 1 << 16  # characters of such a document, at most
SENTENCES = 1_000_000  # lines for training sentencepiece by default; they are in memory
SHOWN = 5  # unreadable lines that are described in the log

Item = TypeVar("Item")


def main(argv: list[str]) -> int:
    """``hpclm train-tokenizer``: train and write a tokenizer, and print its compression and the next command."""
    logs.setup()
    args = _arguments(argv)
    output = Path(args.output)
    library = {".json": "json", ".model": "sentencepiece"}.get(output.suffix)
    if library is None:
        raise ConfigError(f"--output {output} must end in .json (byte-level BPE) or .model (sentencepiece)")
    if library == "json" and args.kind != "bpe":
        raise ConfigError(f"--kind {args.kind} needs an --output that ends in .model; a .json is a byte-level bpe")
    if library == "json" and args.sentences is not None:
        raise ConfigError("--sentences has no effect on a byte-level bpe, which is trained on all text")
    if output.exists() and not args.overwrite:
        raise ConfigError(f"{output} exists; give --overwrite to replace it, or another --output")
    inputs = find(args.input, args.format)
    if args.json_key and not any(source.format == "jsonl" for source in inputs):
        raise ConfigError(f"--json-key {args.json_key} has no effect: no input is JSONL")
    writable_folder(output.parent, "output folder")

    bad: Counter[str] = Counter()
    measured: Sample[str] = Sample(MEASURED)
    pieces = chunks(inputs, longest=args.longest_line * MB)
    texts = _texts(pieces, args.json_key or "text", args.on_error, bad, measured)
    with exit_on_signals():
        first = next(texts, None)
        if first is None:
            raise ConfigError(f"no text in {', '.join(source.name for source in inputs)}; no tokenizer was written")
        texts = chain([first], texts)
        if library == "json":
            content = tokenizers.train_bpe(texts, args.vocab_size)
        else:
            lines = Sample[str](args.sentences or SENTENCES)
            for text in texts:
                for line in filter(None, text.splitlines()):
                    lines.add(line)
            if lines.seen > len(lines.items):
                log.info("training on %s of %s lines, sampled at random", f"{len(lines.items):,}", f"{lines.seen:,}")
            content = tokenizers.train_sentencepiece(lines.items, args.kind, args.vocab_size)
        write_bytes(output, content)

    tokenizer = tokenizers.build(library, [str(output)])
    tokens = len(tokenizer.encode_batch(measured.items)[0])
    size = sum(len(text.encode()) for text in measured.items)
    characters = sum(map(len, measured.items))
    say(
        f"{output}: {tokenizer.size:,} entries; {size / tokens:.2f} bytes per token, "
        f"{tokens / characters:.3f} tokens per character on {len(measured.items):,} of {measured.seen:,} documents"
    )
    if bad:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(bad.items()))
        say(f"{sum(bad.values()):,} unreadable lines skipped ({reasons})")
    read = f"--format {args.format} " if args.format else ""
    read += f"--json-keys {shlex.quote(args.json_key)} " if args.json_key else ""
    say(
        f"next: hpclm preprocess --input {shlex.join(args.input)} {read}--output-prefix DATASET "
        f"--tokenizer {library} --tokenizer-files {shlex.quote(str(output))} --append-eod"
    )
    return 0


class Sample(Generic[Item]):
    """A uniform random sample of at most ``limit`` items; reproducible."""

    def __init__(self, limit: int):
        self.items: list[Item] = []
        self.seen = 0
        self._limit = limit
        self._random = random.Random(limit)

    def add(self, item: Item) -> None:
        """Offer an item."""
        self.seen += 1
        if len(self.items) < self._limit:
            self.items.append(item)
        elif (place := self._random.randrange(self.seen)) < self._limit:
            self.items[place] = item


def _texts(
    pieces: Iterator[Chunk], key: str, on_error: OnError, bad: Counter[str], measured: Sample[str]
) -> Iterator[str]:
    """The documents that are not empty; ConfigError for unreadable ones, unless ``on_error`` is "skip"."""
    for chunk in pieces:
        [texts], problems = read(chunk, (key,), on_error)
        for problem in problems:
            if bad.total() < SHOWN:
                log.warning("skipped: %s%s", chunk.where(problem.line), problem.message)
            bad[problem.reason] += 1
        for text in filter(None, texts):
            measured.add(text[:LONG])
            yield text


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="hpclm train-tokenizer", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    texts = "UTF-8 text or JSONL, .gz, .zst, .parquet, a quoted pattern, or -"
    add("--input", nargs="+", required=True, metavar="FILE", help=texts)
    documents = "documents: JSON objects, lines or files; default: jsonl for .jsonl and .json, otherwise lines"
    add("--format", choices=["jsonl", "lines", "files"], help=documents)
    add("--json-key", metavar="KEY", help="key of the text in JSON; default: text")
    add("--on-error", choices=["stop", "skip"], default="stop", help="what to do with unreadable lines; default: stop")
    add("--longest-line", type=int, default=LONGEST, metavar="MB", help=LONGEST_LINE)
    output = "x.json: byte-level BPE, with <|endoftext|>; x.model: sentencepiece"
    add("--output", required=True, metavar="FILE", help=output)
    add("--kind", choices=["bpe", "unigram"], default="bpe", help="unigram is for x.model only")
    size = "maximum number of entries, including special ones"
    add("--vocab-size", type=int, required=True, metavar="N", help=size)
    sentences = f"random lines for training sentencepiece, held in memory; default: {SENTENCES:,}"
    add("--sentences", type=int, metavar="N", help=sentences)
    add("--overwrite", action="store_true", help="replace a tokenizer of that name")
    args = parser.parse_args(argv)
    if args.sentences is not None and args.sentences < 1:
        parser.error(f"--sentences {args.sentences} must be at least 1")
    if args.longest_line < 1:
        parser.error(f"--longest-line {args.longest_line} must be at least 1")
    return args
