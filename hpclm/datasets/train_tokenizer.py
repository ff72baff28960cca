"""Train a tokenizer: a byte-level BPE (tokenizer.json), or a sentencepiece .model."""

import argparse
import random
import shlex
from collections.abc import Iterator
from pathlib import Path

from hpclm import log, paths
from hpclm.data import tokenizers
from hpclm.datasets.encode import read_texts
from hpclm.datasets.inputs import MAX_LINE_MB, MB, chunks, find
from hpclm.datasets.options import LONGEST_LINE
from hpclm.datasets.tokenizers.huggingface import train_bpe
from hpclm.datasets.tokenizers.sentencepieces import SENTENCES, train_sentencepiece
from hpclm.errors import ConfigError
from hpclm.files import write_bytes
from hpclm.folders import writable_folder
from hpclm.node.interruption import prompt_exit
from hpclm.parser import Parser
from hpclm.terminal import say

MEASURED = 1000  # random documents for measuring the compression
LONG = 1 << 16  # characters of such a document, at most


def main(argv: list[str]) -> int:
    """``hpclm train-tokenizer``: train and write a tokenizer, and print its compression and the next command."""
    log.setup()
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
    key = args.json_key or "text"
    inputs = find(args.input, args.format, [key])
    if args.json_key and not any(source.format == "jsonl" for source in inputs):
        raise ConfigError(f"--json-key {args.json_key} has no effect: no input is JSONL")
    writable_folder(output.parent, "output folder")

    measured = Sample(MEASURED)
    pieces = chunks(inputs, longest=args.longest_line * MB)
    texts = (text for piece in pieces for text in read_texts(piece, (key,))[0][0] if text)

    def offered() -> Iterator[str]:
        for text in texts:
            measured.add(text[:LONG])
            yield text

    with prompt_exit():
        if library == "json":
            content = train_bpe(offered(), args.vocab_size)
        else:
            content = train_sentencepiece(offered(), args.kind, args.vocab_size, args.sentences or SENTENCES)
        if not measured.seen:
            raise ConfigError(f"no text in {', '.join(source.name for source in inputs)}; no tokenizer was written")
        write_bytes(output, content)

    tokenizer = tokenizers.build(library, [str(output)])
    tokens = len(tokenizer.encode_batch(measured.items)[0])
    size = sum(len(text.encode()) for text in measured.items)
    characters = sum(map(len, measured.items))
    say(
        f"{output}: {tokenizer.size:,} entries; {size / tokens:.2f} bytes per token, "
        f"{tokens / characters:.3f} tokens per character on {len(measured.items):,} of {measured.seen:,} documents"
    )
    format = f"--format {args.format} " if args.format else ""
    key = f"--json-keys {shlex.quote(args.json_key)} " if args.json_key else ""
    say(
        f"next: hpclm preprocess --input {shlex.join(args.input)} {format}{key}--output-prefix DATASET "
        f"--tokenizer {library} --tokenizer-files {shlex.quote(str(output))} --append-eod"
    )
    return 0


class Sample:
    """A uniform random sample of at most ``limit`` texts; reproducible."""

    def __init__(self, limit: int):
        self.items: list[str] = []
        self.seen = 0
        self._limit = limit
        self._random = random.Random(limit)

    def add(self, item: str) -> None:
        """Offer a text."""
        self.seen += 1
        if len(self.items) < self._limit:
            self.items.append(item)
        elif (place := self._random.randrange(self.seen)) < self._limit:
            self.items[place] = item


def _arguments(argv: list[str]) -> argparse.Namespace:
    options = parser()
    args = options.parse_args(argv)
    for name in ("sentences", "longest_line"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            options.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    return args


def parser() -> Parser:
    """The parser of ``hpclm train-tokenizer``."""
    options = Parser(prog="hpclm train-tokenizer", description=__doc__, allow_abbrev=False)
    add = options.add_argument
    texts = "what hpclm preprocess --input takes"
    add("--input", type=paths.option, nargs="+", required=True, metavar="FILE", help=texts)
    documents = (
        "documents: JSON objects, lines or files; default: jsonl for .jsonl, .ndjson, .json and tables, otherwise lines"
    )
    add("--format", choices=["jsonl", "lines", "files"], help=documents)
    add("--json-key", "--column", metavar="KEY", help="key, or column, of the text; default: text")
    add("--longest-line", type=int, default=MAX_LINE_MB, metavar="MB", help=LONGEST_LINE)
    output = "x.json: byte-level BPE, with <|endoftext|>; x.model: sentencepiece"
    add("--output", type=paths.option, required=True, metavar="FILE", help=output)
    add("--kind", choices=["bpe", "unigram"], default="bpe", help="unigram is for x.model only")
    size = "maximum number of entries, including special ones"
    add("--vocab-size", type=int, required=True, metavar="N", help=size)
    sentences = f"random lines for training sentencepiece, held in memory; default: {SENTENCES:,}"
    add("--sentences", type=int, metavar="N", help=sentences)
    add("--overwrite", action="store_true", help="replace a tokenizer of that name")
    return options
