"""Learn a tokenizer from text: a byte-level BPE as tokenizer.json, or a sentencepiece .model."""

import argparse
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from hpclm.data import tokenizers
from hpclm.data.preprocess import chunks, guess, texts
from hpclm.errors import ConfigError
from hpclm.files import readable, sync_folder, writable_folder

SAMPLE = 1000  # documents that the compression is measured on


def main(argv: list[str]) -> int:
    """``tools/train_tokenizer.py``: learn, write, say how well it compresses and what to type next."""
    args = _arguments(argv)
    output = Path(args.output)
    library = {".json": "json", ".model": "sentencepiece"}.get(output.suffix)
    if library is None:
        raise ConfigError(f"--output {output} must end in .json (byte-level BPE) or .model (sentencepiece)")
    if library == "json" and args.kind != "bpe":
        raise ConfigError(f"--kind {args.kind} needs an --output that ends in .model; a .json is a byte-level bpe")
    if output.exists() and not args.overwrite:
        raise ConfigError(f"{output} exists; give --overwrite to replace it, or another --output")
    inputs = [(str(readable(path, "input")), args.format or guess(path)) for path in args.input]
    if args.json_key and not any(format == "jsonl" for _, format in inputs):
        raise ConfigError(f"--json-key {args.json_key} has no effect: no input is JSONL")
    writable_folder(output.parent, "output folder")

    def documents() -> Iterator[str]:
        for chunk in chunks(inputs):
            yield from filter(None, texts(chunk, args.json_key or "text"))

    sample = list(islice(documents(), SAMPLE))
    if not sample:
        raise ConfigError(f"no text in {', '.join(path for path, _ in inputs)}; no tokenizer was written")
    if library == "json":
        content = tokenizers.train_bpe(documents(), args.vocab_size)
    else:
        content = tokenizers.train_sentencepiece(documents(), args.kind, args.vocab_size)
    _write(output, content)

    tokenizer = tokenizers.build(library, [str(output)])
    ids = len(tokenizer.encode_batch(sample)[0])
    size = sum(len(text.encode()) for text in sample)
    print(
        f"{output}: {tokenizer.size:,} entries; {size / ids:.2f} bytes per token on the first {len(sample):,} documents"
    )
    print(
        f"next: hpclm preprocess --input {shlex.join(args.input)} --output-prefix DATASET "
        f"--tokenizer {library} --tokenizer-files {shlex.quote(str(output))} --append-eod"
    )
    return 0


def _write(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` in one step."""
    aside = path.with_name(path.name + ".tmp")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_tokenizer.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="UTF-8 text or JSONL")
    parser.add_argument(
        "--format",
        choices=["jsonl", "lines", "files"],
        help="a document is a JSON object per line, a line, or a whole file; default: jsonl for .jsonl and .json, else lines",
    )
    parser.add_argument("--json-key", metavar="KEY", help="where a JSON object has its text; default: text")
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
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer of that name")
    return parser.parse_args(argv)
