"""Train a tokenizer: a byte-level BPE (tokenizer.json), or a sentencepiece .model."""

import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpclm.data import tokenizers
from hpclm.datasets.encode import read_texts
from hpclm.datasets.inputs import MAX_LINE_MB, MB, chunks, find
from hpclm.datasets.tokenizers.huggingface import train_bpe
from hpclm.datasets.tokenizers.sentencepieces import SENTENCES, train_sentencepiece
from hpclm.errors import ConfigError
from hpclm.files import write_bytes
from hpclm.folders import writable_folder
from hpclm.node.interruption import prompt_exit

MEASURED = 1000  # random documents for measuring the compression
LONG = 1 << 16  # characters of such a document, at most


@dataclass(frozen=True)
class TokenizerRequest:
    """A tokenizer to be trained, and on which text."""

    input: Sequence[str]
    output: str
    vocab_size: int
    kind: str = "bpe"
    """bpe or unigram."""
    format: Literal["jsonl", "lines", "files"] | None = None
    """jsonl, lines or files; None: by name and content."""
    json_key: str | None = None
    longest_line: int = MAX_LINE_MB
    """MB."""
    sentences: int | None = None
    """Lines for sentencepiece."""
    overwrite: bool = False


def library_of(wanted: TokenizerRequest) -> str:
    """json or sentencepiece, by the name of the output; ConfigError for options that do not go with it."""
    output = Path(wanted.output)
    library = {".json": "json", ".model": "sentencepiece"}.get(output.suffix)
    if library is None:
        raise ConfigError(f"--output {output} must end in .json (byte-level BPE) or .model (sentencepiece)")
    if library == "json" and wanted.kind != "bpe":
        raise ConfigError(f"--kind {wanted.kind} needs an --output that ends in .model; a .json is a byte-level bpe")
    if library == "json" and wanted.sentences is not None:
        raise ConfigError("--sentences has no effect on a byte-level bpe, which is trained on all text")
    return library


def train(wanted: TokenizerRequest) -> list[str]:
    """Train and write a tokenizer; its compression, and the next command, a line each."""
    output, library = Path(wanted.output), library_of(wanted)
    if output.exists() and not wanted.overwrite:
        raise ConfigError(f"{output} exists; give --overwrite to replace it, or another --output")
    key = wanted.json_key or "text"
    inputs = find(list(wanted.input), wanted.format, [key])
    if wanted.json_key and not any(source.format == "jsonl" for source in inputs):
        raise ConfigError(f"--json-key {wanted.json_key} has no effect: no input is JSONL")
    writable_folder(output.parent, "output folder")

    measured = Sample(MEASURED)
    pieces = chunks(inputs, longest=wanted.longest_line * MB)
    texts = (text for piece in pieces for text in read_texts(piece, (key,))[0][0] if text)

    def offered() -> Iterator[str]:
        for text in texts:
            measured.add(text[:LONG])
            yield text

    with prompt_exit():
        if library == "json":
            content = train_bpe(offered(), wanted.vocab_size)
        else:
            content = train_sentencepiece(offered(), wanted.kind, wanted.vocab_size, wanted.sentences or SENTENCES)
        if not measured.seen:
            raise ConfigError(f"no text in {', '.join(source.name for source in inputs)}; no tokenizer was written")
        write_bytes(output, content)

    tokenizer = tokenizers.build(library, [str(output)])
    tokens = len(tokenizer.encode_batch(measured.items)[0])
    size = sum(len(text.encode()) for text in measured.items)
    characters = sum(map(len, measured.items))
    result = (
        f"{output}: {tokenizer.size:,} entries; {size / tokens:.2f} bytes per token, "
        f"{tokens / characters:.3f} tokens per character on {len(measured.items):,} of {measured.seen:,} documents"
    )
    format = f"--format {wanted.format} " if wanted.format else ""
    key = f"--json-keys {shlex.quote(wanted.json_key)} " if wanted.json_key else ""
    following = (
        f"next: hpclm preprocess --input {shlex.join(wanted.input)} {format}{key}--output-prefix DATASET "
        f"--tokenizer {library} --tokenizer-files {shlex.quote(str(output))} --append-eod"
    )
    return [result, following]


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
