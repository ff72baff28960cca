"""The settings of the data: where samples come from, and how they are cut and ordered."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from hpclm.config.checks import Checked, at_least
from hpclm.config.mixture import mixture, named
from hpclm.errors import ConfigError
from hpclm.registry import problem

SOURCES = {
    "indexed": "hpclm.data.corpus:corpus",
    "synthetic": "hpclm.data.synthetic:synthetic",
}
TOKENIZERS = {
    "bytes": "hpclm.data.tokenizers.plain:Bytes",
    "fairseq": "hpclm.data.tokenizers.fairseq:Fairseq",
    "gpt2": "hpclm.data.tokenizers.huggingface:GPT2",
    "json": "hpclm.data.tokenizers.huggingface:TokenizerJson",
    "sentencepiece": "hpclm.data.tokenizers.sentencepieces:SentencePiece",
    "whitespace": "hpclm.data.tokenizers.plain:Whitespace",
    "wordpiece": "hpclm.data.tokenizers.huggingface:WordPiece",
    "wordpiece_lower": "hpclm.data.tokenizers.huggingface:WordPieceLower",
}
OF_FILES = frozenset(
    ["prefix", "blend", "split", "train", "valid", "test", "validation", "order", "break_mode", "keep_partial"]
    + ["index_cache", "tokenizer", "eod", "extra_ids"]
)
"""Fields of DataConfig that only datasets on disk have."""


@dataclass(frozen=True)
class DataConfig(Checked):
    """Where the samples come from."""

    source: str = "indexed"
    """indexed: a Megatron .bin/.idx dataset; synthetic: a made-up language that needs no file; or package.module:name."""
    prefix: str | None = None
    """Path of the dataset without .bin or .idx; for source=indexed."""
    blend: list[str] = field(default_factory=list)
    """Several datasets instead of one: weights and paths in turn, [0.3, a, 0.7, b], or paths alone to read each whole."""
    split: str = "969,30,1"
    """Parts of the documents of data.prefix or data.blend for training, validation and test, in any unit."""
    train: list[str] = field(default_factory=list)
    """Training datasets, listed as in data.blend and read whole; instead of data.prefix or data.blend, and their split."""
    valid: list[str] = field(default_factory=list)
    """Validation datasets beside data.train."""
    test: list[str] = field(default_factory=list)
    """Test datasets beside data.train."""
    validation: list[str] = field(default_factory=list)
    """Further validation datasets by name, [law=/data/law, code=/data/code], each evaluated on its own and read whole.
    A name that comes again adds a dataset to its set."""
    order: Literal["mcore", "bigscience", "dse"] = "mcore"
    """Whose sample order to follow: Megatron-core, BigScience's Megatron-DeepSpeed, or Megatron-LM v1.1.5."""
    break_mode: Literal["none", "complete", "complete_doc", "eos"] | None = None
    """fairseq's --sample-break-mode: samples are blocks of lines, padded where shorter; null: Megatron's samples."""
    keep_partial: bool = False
    """In validation and test, the tokens that are left over at the end are one more sample, padded and masked."""
    index_cache: str | None = None
    """Folder for the sample order's index files; null: PREFIX.index beside each dataset, and only for large ones."""
    workers: int = 1
    """Threads that read the next steps' samples while the current one is computed; 0: none."""
    tokenizer: str | None = None
    """bytes, fairseq, gpt2, json, sentencepiece, whitespace, wordpiece, wordpiece_lower, or package.module:Name; null: the
    one the dataset was made with."""
    tokenizer_files: list[str] = field(default_factory=list)
    """The tokenizer's files: vocab.json and merges.txt (gpt2), a tokenizer.json (json), a .model (sentencepiece), vocab.json
    (whitespace), vocab.txt (wordpiece), dict.txt and perhaps a .model (fairseq)."""
    eod: str | None = None
    """Text of the token that ends a document, with data.tokenizer; null: the kind's own, such as <|endoftext|> or </s>."""
    extra_ids: int = 0
    """How many <extra_id_N> to append to the vocabulary, as in T5 and mT5; for tokenizer=sentencepiece."""
    eod_mask_loss: bool = False
    """Do not learn to predict what follows an end-of-document token."""
    reset_position_ids: bool = False
    """Count positions from the start of each document, not of the sample."""
    reset_attention_mask: bool = False
    """Attend only within a document."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the data settings."""
        wrong = problem("data.source", self.source, SOURCES)
        if wrong:
            yield wrong
        if self.source == "synthetic":
            yield from self._unused(OF_FILES, "data.source=synthetic")
        else:
            yield from self._listing()
        if self.break_mode:
            yield from self._unused(("order", "keep_partial", "index_cache"), f"data.break_mode={self.break_mode}")
        yield from at_least(0, "data", workers=self.workers)
        if self.tokenizer is not None:
            wrong = problem("data.tokenizer", self.tokenizer, TOKENIZERS)
            if wrong:
                yield wrong
        if self.tokenizer_files and self.tokenizer is None:
            yield "data.tokenizer_files is set but data.tokenizer is not; say which kind of tokenizer the files are"
        yield from at_least(0, "data", extra_ids=self.extra_ids)
        for name in ("eod", "extra_ids"):
            if self.tokenizer is None and self.source != "synthetic" and getattr(self, name):
                yield (
                    f"data.{name}={getattr(self, name)} is set but data.tokenizer is not; a dataset's own tokenizer is "
                    "used as it was made with"
                )
        if self.extra_ids and self.tokenizer in TOKENIZERS and self.tokenizer != "sentencepiece":
            yield f"data.extra_ids={self.extra_ids} has no effect with data.tokenizer={self.tokenizer}; it is for sentencepiece"
        parts = self.split.replace("/", ",").split(",")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 3 or sum(numbers) <= 0 or min(numbers) < 0 or not math.isfinite(sum(numbers)):
            yield f"data.split={self.split!r} must be up to three non-negative numbers, such as 969,30,1"

    def prefixes(self) -> list[str]:
        """Every dataset that the settings name."""
        lists = [self.blend, self.train, self.valid, self.test]
        found = [prefix for words in lists if words for prefix in mixture(words, "data").prefixes]
        found += [prefix for entry in named(self.validation, "data.validation").values() for prefix in entry.prefixes]
        return [self.prefix, *found] if self.prefix else found

    def _listing(self) -> Iterator[str]:
        """What is wrong with the lists of datasets."""
        if self.train:
            yield from self._unused(("prefix", "blend", "split"), "data.train")
        else:
            yield from self._unused(
                ("valid", "test"), "data.prefix or data.blend, which data.split divides; set data.train"
            )
        if self.prefix and self.blend:
            yield f"data.prefix={self.prefix} and data.blend={self.blend} exclude each other; put the path into data.blend"
        for name in ("blend", "train", "valid", "test"):
            if getattr(self, name):
                try:
                    mixture(getattr(self, name), f"data.{name}")
                except ConfigError as error:
                    yield from error.problems
        try:
            named(self.validation, "data.validation")
        except ConfigError as error:
            yield from error.problems

    def _unused(self, names: Iterable[str], why: str) -> Iterator[str]:
        """A sentence for every field of ``names`` that is set although it has no effect with ``why``."""
        for setting in fields(self):
            factory: Any = setting.default_factory
            default = setting.default if factory is MISSING else factory()
            value = getattr(self, setting.name)
            if setting.name in names and value != default:
                yield f"data.{setting.name}={value} has no effect with {why}"
