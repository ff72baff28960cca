"""The tokenizer interface, options, fingerprints, and checks of vocabulary files."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpclm.errors import ConfigError
from hpclm.files import read_bytes, read_text, readable
from hpclm.registry import hint

END = "<|endoftext|>"
T = TypeVar("T")

Batch = tuple[NDArray[np.integer], NDArray[np.int64]]
"""Ids of all texts, concatenated, [t], and the number of tokens of each text, [texts]."""


@dataclass(frozen=True)
class Options:
    """Options of a tokenizer besides its kind and files."""

    eod: str | None = None
    """Text of the end-of-document token; None: the default of the kind."""
    extra_ids: int = 0
    """How many <extra_id_N> to append to a sentencepiece model."""

    def __post_init__(self) -> None:
        if self.extra_ids < 0:
            raise ConfigError(f"extra_ids={self.extra_ids} must be at least 0")


DEFAULTS = Options()


class Tokenizer(Protocol):
    """Text to ids and back.

    Your own class is named package.module:Name. It is constructed with its list of files, and with Options as a second
    argument if data.eod or data.extra_ids is set.
    """

    size: int
    """Size of the vocabulary; every id is smaller."""
    eod: int | None
    """Id of the end-of-document token; None if the vocabulary has none."""
    ends_itself: bool
    """Whether every encoded text already ends with ``eod``."""
    fingerprint: dict[str, Any]
    """JSON: "kind", "files" {name: blake2b of the content}, "size", "eod", and "options" {name: value} that are not the
    defaults; the function ``fingerprint`` of this package makes one."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without an end-of-document token unless ``ends_itself``."""
        ...

    def encode_batch(self, texts: list[str]) -> Batch:
        """``encode`` of each text; ``flat`` converts lists to this."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``."""
        ...


def flat(lists: Sequence[Sequence[int]]) -> Batch:
    """Lists of ids as ``encode_batch`` returns them: int32 ids [t], int64 lengths [lists]."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return np.fromiter(chain.from_iterable(lists), np.int32, int(lengths.sum())), lengths


def fingerprint(kind: str, files: list[str], size: int, eod: int | None, options: Options) -> dict[str, Any]:
    """The ``fingerprint`` of a tokenizer."""
    hashes: dict[str, str] = {}
    for file in files:
        name = Path(file).name
        while name in hashes:  # a/vocab and b/vocab
            name += "'"
        hashes[name] = hashlib.blake2b(read_bytes(file), digest_size=16).hexdigest()
    found: dict[str, Any] = {"kind": kind, "files": hashes, "size": size, "eod": eod}
    default = asdict(DEFAULTS)
    given = {name: value for name, value in asdict(options).items() if value != default[name]}
    return found | ({"options": given} if given else {})


def describe(fingerprint: dict[str, Any]) -> str:
    """A short description: kind, files with the first 8 hex digits of their hashes, vocabulary size."""
    files = ", ".join(f"{name} {hash[:8]}" for name, hash in fingerprint.get("files", {}).items())
    return f"{fingerprint.get('kind')} tokenizer ({files + '; ' if files else ''}{fingerprint.get('size')} entries)"


def mismatch(made_with: dict[str, Any], given: dict[str, Any]) -> str | None:
    """How two fingerprints differ in the meaning of ids, in a sentence that names both; None if they do not.

    File names do not matter.
    """
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


def expect(kind: str, files: list[str], *names: str, optional: int = 0) -> list[Path]:
    """``files`` as readable paths, one for each of ``names``; the last ``optional`` ones may be missing."""
    if not len(names) - optional <= len(files) <= len(names):
        wanted = f"{len(names)} file(s), {' and '.join(names)}" if names else "no files"
        may = f" (the last {optional} may be left out)" if optional else ""
        raise ConfigError(
            f"tokenizer {kind} takes {wanted}{may}, but {len(files)} were given: {', '.join(map(str, files)) or 'none'}"
        )
    return [readable(file, f"{kind} tokenizer's {name}") for file, name in zip(files, names, strict=False)]


def load(kind: str, paths: list[Path], make: Callable[[], T]) -> T:
    """Call ``make``; ConfigError for any exception, because the libraries raise bare Exception for invalid files."""
    try:
        return make()
    except Exception as error:
        names = " and ".join(map(str, paths))
        raise ConfigError(f"tokenizer {kind} cannot use {names}: {error}; is it another kind of file?") from None


def vocabulary(kind: str, path: Path, needed: Iterable[str]) -> dict[str, int]:
    """The {word: id} of a vocab.json, which must contain all of ``needed``."""
    try:
        ids = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tokenizer {kind}: {path} is not JSON: {error}") from None
    if not isinstance(ids, dict) or not all(type(id) is int and id >= 0 for id in ids.values()):
        raise ConfigError(f"tokenizer {kind}: {path} must be a JSON object of words and ids")
    missing = sorted(set(needed) - set(ids))
    if missing:
        raise ConfigError(f"tokenizer {kind}: {path} lacks {len(missing)} required entries, such as {missing[:5]}")
    return ids


def named_end(kind: str, path: Path, options: Options, ids: Mapping[str, int], candidates: Iterable[str]) -> int | None:
    """The id of the end-of-document token in ``options``; None if there is none.

    ids: {text: id} of the vocabulary in ``path``; candidates: suggestions for the error.
    """
    if options.eod is None or options.eod in ids:
        return None if options.eod is None else ids[options.eod]
    some = list(candidates)[:20]
    listed = f"; it has {', '.join(map(repr, some))}" if some else ""
    raise ConfigError(
        f"end-of-document token {options.eod!r} is not in {path} of the {kind} tokenizer{listed}"
        f"{hint(options.eod, some)}; use one of its {len(ids)} entries"
    )


def no_extra_ids(kind: str, options: Options) -> None:
    """ConfigError if extra ids are set, which only sentencepiece supports."""
    if options.extra_ids:
        raise ConfigError(f"extra_ids={options.extra_ids} is only for tokenizer sentencepiece, not {kind}")


def only_end(kind: str, options: Options, end: str) -> None:
    """ConfigError if ``options`` set an end-of-document token other than ``end``, the only one of ``kind``."""
    if options.eod not in (None, end):
        raise ConfigError(f"tokenizer {kind} always ends documents with {end!r}; leave out eod={options.eod!r}")
