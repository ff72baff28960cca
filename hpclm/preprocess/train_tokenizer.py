"""Train a tokenizer: a byte-level BPE (tokenizer.json), or a sentencepiece .model."""

import logging
import math
import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpclm.base.errors import ConfigError, UsageError
from hpclm.base.files import write_bytes
from hpclm.base.folders import writable_folder
from hpclm.data import tokenizers
from hpclm.node import interruption
from hpclm.preprocess.encode import LONG_TOKEN, read_texts
from hpclm.preprocess.inputs import MAX_LINE_MB, MB, chunks, find
from hpclm.preprocess.tokenizers.huggingface import train_bpe
from hpclm.preprocess.tokenizers.sentencepieces import SENTENCES, train_sentencepiece

log = logging.getLogger(__name__)
MEASURED = 1000  # random documents for measuring the compression
LONG = 1 << 16  # maximum number of characters of a measured document
FITTING = range(9, 16)  # default vocabulary sizes are 2 to the power of these
PACKED = 4  # bytes of text per byte of a compressed file
RARE = 100  # occurrences in the text needed to learn an entry well
SHORT_WAY = 200_000_000  # bytes of text that one process tokenizes in about a minute


@dataclass(frozen=True)
class TokenizerRequest:
    """A tokenizer to train, and the text to train it on."""

    input: Sequence[str]
    output: str
    vocab_size: int | None = None
    """None: for a byte-level BPE, a size that fits the text."""
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
    """json or sentencepiece, by the name of the output; UsageError for options that do not apply to it."""
    output = Path(wanted.output)
    library = {".json": "json", ".model": "sentencepiece"}.get(output.suffix)
    if library is None:
        raise UsageError(f"--output {output} must end in .json (byte-level BPE) or .model (sentencepiece)")
    if library == "json" and wanted.kind != "bpe":
        raise UsageError(f"--kind {wanted.kind} needs an --output that ends in .model; a .json is a byte-level bpe")
    if library == "json" and wanted.sentences is not None:
        raise UsageError("--sentences has no effect on a byte-level bpe, which is trained on all text")
    return library


def train(wanted: TokenizerRequest) -> list[str]:
    """Train and write a tokenizer. Returns lines with its compression and the next command."""
    output = Path(wanted.output)
    library = library_of(wanted)
    if output.exists() and not wanted.overwrite:
        raise ConfigError(f"{output} exists; give --overwrite to replace it, or another --output")
    key = wanted.json_key or "text"
    inputs = find(list(wanted.input), wanted.format, [key])
    if wanted.json_key and not any(source.format == "jsonl" for source in inputs):
        raise ConfigError(f"--json-key {wanted.json_key} has no effect: no input is JSONL")
    size_on_disk = sum(source.size * (PACKED if source.storage else 1) for source in inputs)
    if wanted.vocab_size is None and (library != "json" or not size_on_disk):
        raise ConfigError(f"give --vocab-size, such as 8000, for {output.name if size_on_disk else 'standard input'}")
    vocab_size = wanted.vocab_size
    if vocab_size is None:
        vocab_size = fitting_size(size_on_disk)
    writable_folder(output.parent, "output folder")

    measured = TextSample(MEASURED)
    text_bytes = 0
    divided = False

    def offered() -> Iterator[str]:
        nonlocal text_bytes, divided
        for piece in chunks(inputs, longest=wanted.longest_line * MB, may_cut=lambda before, after: True):
            divided |= piece.is_piece
            for text in filter(None, read_texts(piece, (key,))[0][0]):
                measured.add(text[:LONG])
                text_bytes += len(text.encode())
                yield text

    with interruption.at_once():
        if library == "json":
            content = train_bpe(offered(), vocab_size)
        else:
            content = train_sentencepiece(offered(), wanted.kind, vocab_size, wanted.sentences or SENTENCES)
    if not measured.seen:
        raise ConfigError(f"no text in {', '.join(source.name for source in inputs)}; no tokenizer was written")
    with interruption.raising():
        write_bytes(output, content)

    tokenizer = tokenizers.build_tokenizer(library, [str(output)])
    tokens = len(tokenizer.encode_batch(measured.items)[0])
    size = sum(len(text.encode()) for text in measured.items)
    characters = sum(map(len, measured.items))
    result = (
        f"{output}: {tokenizer.size:,} entries; {size / tokens:.2f} bytes per token, "
        f"{tokens / characters:.3f} tokens per character on {len(measured.items):,} of {measured.seen:,} {'pieces of text' if divided else 'documents'}"
    )
    if size > LONG_TOKEN * tokens:
        log.warning(
            "%s: tokens have %.0f bytes of text on average (3 to 5 are usual), so entries are whole sentences that do not occur in other "
            "text; give more text, or a smaller --vocab-size",
            output, size / tokens,
        )  # fmt: skip
    if tokenizer.size < vocab_size:
        result += f"\nfewer than --vocab-size {vocab_size}, because the text has no more pairs of entries to merge"
    occurrences = round(text_bytes * tokens / size / tokenizer.size)
    fitting = fitting_size(text_bytes)
    if occurrences < RARE and fitting < tokenizer.size:
        log.warning(
            "%s: an entry occurs %s in the text on average, too rarely to be learned well; --vocab-size %s fits %.3g MB of text",
            output, "once" if occurrences <= 1 else f"{occurrences} times", fitting, text_bytes / MB,
        )  # fmt: skip
    if len(wanted.input) == 1 and not (wanted.format or wanted.json_key) and text_bytes < SHORT_WAY:
        tokenized = [f"data={wanted.input[0]}", f"tokenizer={output}"]
        return [result, f"next: {shlex.join(['hpclm', 'train', 'small', *tokenized])}"]
    command = ["hpclm", "preprocess", "--input", *wanted.input]
    if wanted.format:
        command += ["--format", wanted.format]
    if wanted.json_key:
        command += ["--json-keys", wanted.json_key]
    command += ["--output-prefix", "DATASET", "--tokenizer", library, "--tokenizer-files", str(output), "--append-eod"]
    return [result, f"next: {shlex.join(command)}"]


def fitting_size(text_bytes: int) -> int:
    """A vocabulary size for this much text: about the square root of its bytes, so that entries occur hundreds of times."""
    power = round(math.log2(max(text_bytes, 1)) / 2)
    return 1 << min(max(power, FITTING[0]), FITTING[-1])


class TextSample:
    """A uniform random sample of at most ``limit`` texts; reproducible."""

    def __init__(self, limit: int):
        self.items: list[str] = []
        self.seen = 0
        self._limit = limit
        self._random = random.Random(limit)

    def add(self, item: str) -> None:
        """Add a text, which the sample keeps or drops at random."""
        self.seen += 1
        if len(self.items) < self._limit:
            self.items.append(item)
            return
        place = self._random.randrange(self.seen)
        if place < self._limit:
            self.items[place] = item
