"""Checks of vocabulary files and options, shared by several kinds of tokenizers."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from hpclm.base.errors import ConfigError
from hpclm.base.files import read_text, readable
from hpclm.base.registry import hint
from hpclm.base.terminal import many

T = TypeVar("T")


def expect(kind: str, files: list[str], *names: str, optional: int = 0) -> list[Path]:
    """``files`` as readable paths, one for each of ``names``; the last ``optional`` ones may be missing."""
    if not len(names) - optional <= len(files) <= len(names):
        needed = f"{many(len(names), 'file')}, {' and '.join(names)}" if names else "no files"
        if optional:
            needed += f" (the last {optional} may be omitted)"
        given = ", ".join(map(str, files)) or "none"
        raise ConfigError(f"tokenizer {kind} takes {needed}, but got {len(files)}: {given}")
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
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        listed = f"{'entry' if len(missing) == 1 else 'entries'} {', '.join(map(repr, missing[:5]))}{more}"
        raise ConfigError(f"tokenizer {kind}: {path} lacks the required {listed}")
    return ids


def id_of_end(kind: str, path: Path, end: str, ids: Mapping[str, int], candidates: Iterable[str]) -> int:
    """The id of the end-of-document token ``end``. ``ids``: {text: id} of ``path``; ``candidates``: suggestions for the error."""
    if end in ids:
        return ids[end]
    problem = f"end-of-document token {end!r} is not in {path} of the {kind} tokenizer"
    some = list(candidates)[:20]
    if some:
        problem += f"; it has {', '.join(map(repr, some))}"
    raise ConfigError(f"{problem}{hint(end, some)}; use one of its {len(ids)} entries")


def only_end(kind: str, given: str | None, end: str) -> None:
    """ConfigError if the end-of-document token ``given`` is not ``end``, the only one of ``kind``."""
    if given not in (None, end):
        raise ConfigError(f"tokenizer {kind} always ends documents with {end!r}; leave out eod={given!r}")
