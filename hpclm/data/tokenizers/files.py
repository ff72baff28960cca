"""The files of a tokenizer: as many as its kind takes, and of that kind."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from hpclm.data.tokenizers.interface import Options
from hpclm.errors import ConfigError
from hpclm.files import readable
from hpclm.registry import hint

T = TypeVar("T")


def expect(kind: str, files: list[str], *names: str, optional: int = 0) -> list[Path]:
    """``files`` as readable paths, as many as ``names``; the last ``optional`` ones may be left out."""
    if not len(names) - optional <= len(files) <= len(names):
        wanted = f"{len(names)} file(s), {' and '.join(names)}" if names else "no files"
        may = f" (the last {optional} may be left out)" if optional else ""
        raise ConfigError(
            f"tokenizer {kind} takes {wanted}{may}; given {len(files)}: {', '.join(map(str, files)) or 'none'}"
        )
    return [readable(file, f"{kind} tokenizer's {name}") for file, name in zip(files, names, strict=False)]


def load(kind: str, paths: list[Path], make: Callable[[], T]) -> T:
    """What ``make`` makes of the paths; the libraries raise bare Exception and RuntimeError for files of another kind."""
    try:
        return make()
    except Exception as error:
        names = " and ".join(map(str, paths))
        raise ConfigError(f"tokenizer {kind} cannot use {names}: {error}; is it a file of another kind?") from None


def vocabulary(kind: str, path: Path, needed: Iterable[str]) -> dict[str, int]:
    """The {word: id} of a vocab.json that has all of ``needed``."""
    try:
        ids = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tokenizer {kind}: {path} is not JSON: {error}") from None
    if not isinstance(ids, dict) or not all(type(id) is int and id >= 0 for id in ids.values()):
        raise ConfigError(f"tokenizer {kind}: {path} must be a JSON object of words and their ids")
    missing = sorted(set(needed) - set(ids))
    if missing:
        raise ConfigError(f"tokenizer {kind}: {path} lacks {len(missing)} entries it needs, among them {missing[:5]}")
    return ids


def named_end(kind: str, path: Path, options: Options, ids: Mapping[str, int], candidates: Iterable[str]) -> int | None:
    """The id of the end-of-document token that ``options`` names, None where they name none.

    ids: {text: id} of the vocabulary that ``path`` holds; candidates: tokens that may well be meant, for the error.
    """
    if options.eod is None or options.eod in ids:
        return None if options.eod is None else ids[options.eod]
    some = list(candidates)[:20]
    listed = f"; it has {', '.join(map(repr, some))}" if some else ""
    raise ConfigError(
        f"end-of-document token {options.eod!r} is not in {path} of the {kind} tokenizer{listed}"
        f"{hint(options.eod, some)}; name one of its {len(ids)} entries"
    )


def no_extra_ids(kind: str, options: Options) -> None:
    """ConfigError where ``options`` ask for what only sentencepiece has."""
    if options.extra_ids:
        raise ConfigError(f"extra_ids={options.extra_ids} is for tokenizer sentencepiece; the kind {kind} has none")


def only_end(kind: str, options: Options, end: str) -> None:
    """ConfigError where ``options`` name another end-of-document token than the only one that ``kind`` has."""
    if options.eod not in (None, end):
        raise ConfigError(
            f"tokenizer {kind} ends documents with {end!r} and nothing else; leave out eod={options.eod!r}"
        )
