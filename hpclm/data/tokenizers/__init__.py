"""Text to token ids and back, by the libraries and file formats that people have vocabularies in.

Nothing is downloaded, no code comes with a vocabulary, and a library is imported when a tokenizer that needs it is built.
"""

from dataclasses import fields
from typing import Any

from hpclm.config.data import TOKENIZERS, DataConfig
from hpclm.data.disk.indexed import sidecar
from hpclm.data.tokenizers.fairseq import dictionary
from hpclm.data.tokenizers.huggingface import train_bpe
from hpclm.data.tokenizers.identities import describe, identity, mismatch
from hpclm.data.tokenizers.interface import DEFAULTS, END, Batch, Options, Tokenizer, flat
from hpclm.data.tokenizers.sentencepieces import train_sentencepiece
from hpclm.errors import ConfigError
from hpclm.registry import lookup

__all__ = [
    "END",
    "Batch",
    "Options",
    "Tokenizer",
    "build",
    "describe",
    "dictionary",
    "end",
    "flat",
    "identity",
    "mismatch",
    "of_run",
    "train_bpe",
    "train_sentencepiece",
]

NEEDED = ("size", "eod", "identity", "encode", "encode_batch", "decode")
"""What a person's own class must have; ``ends_itself`` is False where it does not say."""


def build(kind: str, files: list[str], options: Options = DEFAULTS) -> Tokenizer:
    """The tokenizer ``kind`` (data.tokenizer) made from its ``files``; ConfigError when they do not fit together."""
    make = lookup("tokenizer", kind, TOKENIZERS)
    if kind in TOKENIZERS:
        known: Tokenizer = make(files) if options == DEFAULTS else make(files, options)
        return known
    try:
        made: Tokenizer = make(files) if options == DEFAULTS else make(files, options)
    except TypeError as error:
        raise ConfigError(f"tokenizer {kind} cannot be made with a list of files: {error}") from error
    lacks = [name for name in NEEDED if not hasattr(made, name)]
    if lacks:
        raise ConfigError(
            f"tokenizer {kind} lacks {', '.join(lacks)}; hpclm/data/tokenizers/interface.py says what it needs"
        )
    return made


def end(tokenizer: Tokenizer) -> int:
    """The id of the end-of-document token; ConfigError where there is none."""
    if tokenizer.eod is None:
        raise ConfigError(
            f"the {describe(tokenizer.identity)} has no end-of-document token; name one of its entries with data.eod "
            "(--eod in preprocessing)"
        )
    return tokenizer.eod


def of_run(data: DataConfig) -> Tokenizer:
    """The tokenizer of a run: the one its settings name, or the one its dataset was made with."""
    if data.tokenizer is not None:
        return build(data.tokenizer, data.tokenizer_files, Options(data.eod, data.extra_ids))
    notes = ((prefix, sidecar(prefix)) for prefix in data.prefixes())
    prefix, note = next(((prefix, note) for prefix, note in notes if note), ("", {}))
    if not note:
        raise ConfigError("the run's dataset does not name its tokenizer; set data.tokenizer and data.tokenizer_files")
    kind, paths = note["tokenizer"]["kind"], note.get("tokenizer_files")
    if kind not in TOKENIZERS:  # a file that came with a dataset does not say what code is run
        raise ConfigError(
            f"the note about dataset {prefix} names tokenizer {kind!r}, which is none of hpclm's own; if you know it, "
            f"set data.tokenizer={kind} and data.tokenizer_files"
        )
    if not isinstance(paths, list):
        raise ConfigError(f"the note about dataset {prefix} names no tokenizer_files; set data.tokenizer")
    tokenizer = build(kind, paths, noted(note["tokenizer"]))
    wrong = mismatch(note["tokenizer"], tokenizer.identity)
    if wrong:
        raise ConfigError(
            f"the tokenizer of dataset {prefix} has changed: {wrong}; put the old {', '.join(paths) or 'one'} back, "
            "or set data.tokenizer"
        )
    return tokenizer


def noted(identity: dict[str, Any]) -> Options:
    """The options that a tokenizer of this identity was built with."""
    options = identity.get("options", {})
    types = {"eod": str, "extra_ids": int}
    known = {field.name for field in fields(Options)}
    if not isinstance(options, dict) or not all(
        name in known and type(value) is types[name] for name, value in options.items()
    ):
        raise ConfigError(
            f"the tokenizer in a dataset's note has options {options!r}; this hpclm knows {sorted(known)}"
        )
    return Options(**options)
