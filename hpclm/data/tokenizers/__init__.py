"""Tokenizers: text to token ids and back, for common libraries and file formats.

Nothing is downloaded, no code is loaded with a vocabulary, and libraries are imported only when they are used.
"""

from dataclasses import fields
from typing import Any

from hpclm.config.data import TOKENIZERS, DataConfig
from hpclm.data.disk.indexed import sidecar
from hpclm.data.tokenizers.fairseq import dictionary
from hpclm.data.tokenizers.huggingface import train_bpe
from hpclm.data.tokenizers.interface import (
    DEFAULTS,
    END,
    Batch,
    Options,
    Tokenizer,
    describe,
    fingerprint,
    flat,
    mismatch,
)
from hpclm.data.tokenizers.sentencepieces import train_sentencepiece
from hpclm.errors import ConfigError
from hpclm.registry import a_class, lookup

__all__ = [
    "END",
    "Batch",
    "Options",
    "Tokenizer",
    "build",
    "describe",
    "dictionary",
    "end",
    "fingerprint",
    "flat",
    "mismatch",
    "of_run",
    "train_bpe",
    "train_sentencepiece",
]

CHECK = a_class("encode", "encode_batch", "decode", made_with=["files"])
REQUIRED = ("size", "eod", "fingerprint", "encode", "encode_batch", "decode")
"""Attributes of a user-defined tokenizer; ``ends_itself`` is optional."""


def build(kind: str, files: list[str], options: Options = DEFAULTS) -> Tokenizer:
    """Build the tokenizer ``kind`` (data.tokenizer) from its ``files``; ConfigError if they do not match."""
    make = lookup("tokenizer", kind, TOKENIZERS, CHECK)
    if kind in TOKENIZERS:
        known: Tokenizer = make(files) if options == DEFAULTS else make(files, options)
        return known
    try:
        made: Tokenizer = make(files) if options == DEFAULTS else make(files, options)
    except TypeError as error:
        raise ConfigError(f"tokenizer {kind} cannot be built from a list of files: {error}") from error
    lacks = [name for name in REQUIRED if not hasattr(made, name)]
    if lacks:
        raise ConfigError(
            f"tokenizer {kind} lacks {', '.join(lacks)}; hpclm/data/tokenizers/interface.py says what it needs"
        )
    return made


def end(tokenizer: Tokenizer) -> int:
    """The id of the end-of-document token; ConfigError if there is none."""
    if tokenizer.eod is None:
        raise ConfigError(
            f"the {describe(tokenizer.fingerprint)} has no end-of-document token; set data.eod "
            "(--eod in preprocessing) to one of its entries"
        )
    return tokenizer.eod


def of_run(data: DataConfig) -> Tokenizer:
    """The tokenizer of a run, from its settings or from its dataset."""
    if data.tokenizer is not None:
        return build(data.tokenizer, data.tokenizer_files, Options(data.eod, data.extra_ids))
    notes = ((prefix, sidecar(prefix)) for prefix in data.prefixes())
    prefix, note = next(((prefix, note) for prefix, note in notes if "tokenizer" in note), ("", {}))
    if not note:
        raise ConfigError("the run's dataset does not name its tokenizer; set data.tokenizer and data.tokenizer_files")
    kind, paths = note["tokenizer"]["kind"], note.get("tokenizer_files")
    if kind not in TOKENIZERS:  # a dataset must not decide which code is run
        raise ConfigError(
            f"{prefix}.json names the user-defined tokenizer {kind!r}; if you trust it, set data.tokenizer={kind} and "
            "data.tokenizer_files"
        )
    if not isinstance(paths, list):
        raise ConfigError(f"{prefix}.json names no tokenizer_files; set data.tokenizer")
    tokenizer = build(kind, paths, noted(note["tokenizer"]))
    wrong = mismatch(note["tokenizer"], tokenizer.fingerprint)
    if wrong:
        raise ConfigError(
            f"the tokenizer of dataset {prefix} has changed: {wrong}; restore {', '.join(paths) or 'it'}, "
            "or set data.tokenizer"
        )
    return tokenizer


def noted(fingerprint: dict[str, Any]) -> Options:
    """The options in a tokenizer's fingerprint."""
    options = fingerprint.get("options", {})
    types = {"eod": str, "extra_ids": int}
    known = {field.name for field in fields(Options)}
    if not isinstance(options, dict) or not all(
        name in known and type(value) is types[name] for name, value in options.items()
    ):
        raise ConfigError(
            f"the dataset's tokenizer has options {options!r}; this version of hpclm supports {sorted(known)}"
        )
    return Options(**options)
