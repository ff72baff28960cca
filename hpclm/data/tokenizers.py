"""Tokenizers: their interface, options and fingerprints, and building the one that a run or a dataset names.

The kinds are in ``hpclm.preprocess.tokenizers``. Nothing is downloaded, no code is loaded with a vocabulary, and libraries are imported
only when they are used.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError
from hpclm.base.files import read_bytes
from hpclm.base.registry import class_check, lookup
from hpclm.config.data import TOKENIZERS

END = "<|endoftext|>"
PROBE = "The quick brown fox jumps over the lazy dog; so it goes, and then it comes back again. " * 4
"""A long text, which a tokenizer that draws at random is unlikely to encode twice in the same way."""
CHECK = class_check("encode", "encode_batch", "decode", made_with=["files"])
REQUIRED = ("size", "eod", "fingerprint", "encode", "encode_batch", "decode")
"""Attributes of a user-defined tokenizer; ``ends_itself`` and ``special_ids`` are optional."""

Batch = tuple[NDArray[np.integer], NDArray[np.int64]]
"""Ids of all texts, concatenated, [t], and the number of tokens of each text, [texts]."""


class Tokenizer(Protocol):
    """Text to ids and back.

    A user-defined class is named package.module:Name. It is constructed with its list of files, and with the text of the end-of-document
    token as a second argument if data.eod is set.
    """

    size: int
    """Size of the vocabulary; every id is smaller."""
    eod: int | None
    """Id of the end-of-document token; None without one."""
    ends_itself: bool
    """Whether every encoded text already ends with ``eod``."""
    fingerprint: dict[str, Any]
    """JSON: "kind", "files" {name: blake2b of the content}, "size", "eod", and "options" {name: value} that differ from the defaults;
    the function ``fingerprint`` of this module creates one."""

    # also optional: token_text(id), token_id(text), and for_transformers(folder), see hpclm.preprocess.tokenizers
    @property
    def special_ids(self) -> Mapping[int, str]:
        """Ids that are not text, with their names: special tokens and the unknown token. Optional for user-defined classes."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without an end-of-document token unless ``ends_itself``."""
        ...

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text; ``flat`` converts lists to this form."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``."""
        ...


def flat(lists: Sequence[Sequence[int]]) -> Batch:
    """Lists of ids as ``encode_batch`` returns them: int32 ids [t], int64 lengths [lists]."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return np.fromiter(chain.from_iterable(lists), np.int32, int(lengths.sum())), lengths


def fingerprint(kind: str, files: list[str], size: int, eod: int | None, end: str | None = None) -> dict[str, Any]:
    """The ``fingerprint`` of a tokenizer. ``end``: the text of its end-of-document token, if chosen by data.eod."""
    hashes: dict[str, str] = {}
    for file in files:
        name = Path(file).name
        while name in hashes:  # a/vocab and b/vocab
            name += "'"
        hashes[name] = hashlib.blake2b(read_bytes(file), digest_size=16).hexdigest()
    whole: dict[str, Any] = {"kind": kind, "files": hashes, "size": size, "eod": eod}
    if end is not None:
        whole["options"] = {"eod": end}
    return whole


def describe(fingerprint: dict[str, Any]) -> str:
    """A short description: kind, files with the first 8 hex digits of their hashes, vocabulary size."""
    size = f"{fingerprint.get('size')} entries"
    files = ", ".join(f"{name} {hash[:8]}" for name, hash in fingerprint.get("files", {}).items())
    if files:
        size = f"{files}; {size}"
    return f"{fingerprint.get('kind')} tokenizer ({size})"


def mismatch(made_with: dict[str, Any], given: dict[str, Any]) -> str | None:
    """A sentence about how two tokenizers differ in the meaning of ids; None if they do not. File names do not matter."""
    hashes = [sorted(one.get("files", {}).values()) for one in (made_with, given)]
    differ = [
        f"{key} {made_with.get(key)} against {given.get(key)}"
        for key in ("kind", "size", "eod")
        if made_with.get(key) != given.get(key)
    ]
    if hashes[0] != hashes[1]:
        differ.append("the content of the files")
    if not differ:
        return None
    return f"made with the {describe(made_with)}, given the {describe(given)}; they differ in {', '.join(differ)}"


def build_tokenizer(kind: str, files: list[str], eod: str | None = None) -> Tokenizer:
    """Build the tokenizer ``kind`` (data.tokenizer) from its ``files``; ConfigError if they do not match.

    ``eod``: text of the end-of-document token; None: the default of its kind.
    """
    make = lookup("tokenizer", kind, TOKENIZERS, CHECK)
    arguments: list[Any] = [files]
    if eod is not None:
        arguments.append(eod)
    if kind in TOKENIZERS:
        registered: Tokenizer = make(*arguments)
        return registered
    try:
        tokenizer: Tokenizer = make(*arguments)
    except TypeError as error:
        raise ConfigError(f"tokenizer {kind} cannot be built from a list of files: {error}") from error
    missing = [name for name in REQUIRED if not hasattr(tokenizer, name)]
    if missing:
        raise ConfigError(
            f"tokenizer {kind} lacks {', '.join(missing)}; hpclm/data/tokenizers.py lists the requirements"
        )
    if draws_at_random(tokenizer):
        raise ConfigError(
            f"tokenizer {kind} gives other ids each time it encodes a text, so datasets and scores would not be reproducible; "
            "let encode() return the same ids for the same text"
        )
    return tokenizer


def draws_at_random(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer gives other ids each time it encodes the same text; False if it cannot encode English."""
    try:
        first, second = (tokenizer.encode(PROBE) for _ in range(2))
    except Exception:  # a tokenizer for another kind of text may raise anything
        return False
    return not np.array_equal(first, second)


def end(tokenizer: Tokenizer) -> int:
    """The id of the end-of-document token; ConfigError without one."""
    if tokenizer.eod is None:
        raise ConfigError(
            f"the {describe(tokenizer.fingerprint)} has no end-of-document token; set data.eod "
            "(--eod in preprocessing) to one of its entries"
        )
    return tokenizer.eod
