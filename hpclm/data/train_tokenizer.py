"""Learn a tokenizer from text: a byte-level BPE as tokenizer.json, or a sentencepiece .model."""

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
from hpclm.data.text.inputs import Input, chunks, find
from hpclm.data.text.pool import told_to_end
from hpclm.errors import ConfigError
from hpclm.files import writable_folder, write_bytes

log = logging.getLogger(__name__)
MEASURED = 1000  # documents, from all over the inputs, that the compression is measured on
LONG = 1 << 16  # characters of such a document that count
SENTENCES = 1_000_000  # lines that sentencepiece learns from by default; it holds them in memory
SHOWN = 5  # bad lines that are described in the log

Item = TypeVar("Item")


def main(argv: list[str]) -> int:
    """``tools/train_tokenizer.py``: learn, write, say how well it compresses and what to type next."""
    logs.setup()
    args = _arguments(argv)
    output = Path(args.output)
    library = {".json": "json", ".model": "sentencepiece"}.get(output.suffix)
    if library is None:
        raise ConfigError(f"--output {output} must end in .json (byte-level BPE) or .model (sentencepiece)")
    if library == "json" and args.kind != "bpe":
        raise ConfigError(f"--kind {args.kind} needs an --output that ends in .model; a .json is a byte-level bpe")
    if library == "json" and args.sentences is not None:
        raise ConfigError("--sentences has no effect on a byte-level bpe, which counts the words of all text")
    if output.exists() and not args.overwrite:
        raise ConfigError(f"{output} exists; give --overwrite to replace it, or another --output")
    inputs = find(args.input, args.format)
    if args.json_key and not any(source.format == "jsonl" for source in inputs):
        raise ConfigError(f"--json-key {args.json_key} has no effect: no input is JSONL")
    writable_folder(output.parent, "output folder")

    bad: Counter[str] = Counter()
    measured: Sample[str] = Sample(MEASURED)
    texts = _texts(inputs, args.json_key or "text", args.on_error, bad, measured)
    with told_to_end():
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
                log.info("learning from %s of %s lines, drawn from all", f"{len(lines.items):,}", f"{lines.seen:,}")
            content = tokenizers.train_sentencepiece(lines.items, args.kind, args.vocab_size)
        write_bytes(output, content)

    tokenizer = tokenizers.build(library, [str(output)])
    tokens = len(tokenizer.encode_batch(measured.items)[0])
    size = sum(len(text.encode()) for text in measured.items)
    characters = sum(map(len, measured.items))
    print(
        f"{output}: {tokenizer.size:,} entries; {size / tokens:.2f} bytes per token, "
        f"{tokens / characters:.3f} tokens per character on {len(measured.items):,} of {measured.seen:,} documents"
    )
    if bad:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(bad.items()))
        print(f"{sum(bad.values()):,} lines skipped that cannot be read ({reasons})")
    print(
        f"next: hpclm preprocess --input {shlex.join(args.input)} --output-prefix DATASET "
        f"--tokenizer {library} --tokenizer-files {shlex.quote(str(output))} --append-eod"
    )
    return 0


class Sample(Generic[Item]):
    """At most ``limit`` of the items it is shown, each as likely as any other; the same ones every time."""

    def __init__(self, limit: int):
        self.items: list[Item] = []
        self.seen = 0
        self._limit = limit
        self._random = random.Random(limit)

    def add(self, item: Item) -> None:
        """Show it an item."""
        self.seen += 1
        if len(self.items) < self._limit:
            self.items.append(item)
        elif (place := self._random.randrange(self.seen)) < self._limit:
            self.items[place] = item


def _texts(inputs: list[Input], key: str, on_error: OnError, bad: Counter[str], measured: Sample[str]) -> Iterator[str]:
    """The documents that are not empty; ConfigError names file and line of one that cannot be read, unless ``on_error`` is "skip"."""
    for chunk in chunks(inputs):
        [texts], problems = read(chunk, (key,), on_error)
        for problem in problems:
            if bad.total() < SHOWN:
                log.warning("skipped: %s%s", chunk.where(problem.line), problem.message)
            bad[problem.reason] += 1
        for text in filter(None, texts):
            measured.add(text[:LONG])
            yield text


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_tokenizer.py", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 text or JSONL, .gz, .zst, a quoted pattern, or -",
    )
    parser.add_argument(
        "--format",
        choices=["jsonl", "lines", "files"],
        help="a document is a JSON object per line, a line, or a whole file; default: jsonl for .jsonl and .json, else lines",
    )
    parser.add_argument("--json-key", metavar="KEY", help="where a JSON object has its text; default: text")
    parser.add_argument("--on-error", choices=["stop", "skip"], default="stop", help="lines that cannot be read")
    parser.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="x.json: byte-level BPE, with <|endoftext|>; x.model: sentencepiece",
    )
    parser.add_argument("--kind", choices=["bpe", "unigram"], default="bpe", help="unigram is for x.model only")
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="entries at most, special ones included"
    )
    parser.add_argument(
        "--sentences",
        type=int,
        metavar="N",
        help=f"lines, drawn from all, that sentencepiece learns from and holds in memory; default: {SENTENCES:,}",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer of that name")
    args = parser.parse_args(argv)
    if args.sentences is not None and args.sentences < 1:
        parser.error(f"--sentences {args.sentences} must be at least 1")
    return args
