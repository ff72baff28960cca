"""A run's config.yaml, and its earlier versions, which are kept: config-history/0001.yaml and so on."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpclm import files
from hpclm.config.resolved import HISTORY, NAME

_VERSION = re.compile(r"(\d{4,})\.yaml")


@dataclass(frozen=True)
class Replaced:
    """What ``replace`` has changed."""

    before: bytes | None
    """The config.yaml that was there."""
    added: str | None
    """The version that it became in the history, if that is new."""


def replace(out: Path, text: str) -> Replaced:
    """Make ``text`` the config.yaml of the run directory ``out``; the one before it is kept in the history."""
    with files.locked(_folder(out)):
        before, added = _read(out / NAME), None
        if before is not None:
            last = max(_versions(out), default=0)
            kept = _keep(out, before)
            added = kept if kept != _name(last) else None
        if before != text.encode():
            files.write_text(out / NAME, text)
    return Replaced(before, added)


def restore(out: Path, replaced: Replaced) -> None:
    """Undo a ``replace``."""
    if replaced.before is None:
        (out / NAME).unlink(missing_ok=True)
    else:
        files.write_bytes(out / NAME, replaced.before)
    if replaced.added:
        (out / HISTORY / replaced.added).unlink(missing_ok=True)
    with suppress(OSError):  # unless it has other versions
        (out / HISTORY).rmdir()


def use(out: Path, text: str) -> str:
    """As ``replace``, for an attempt that trains with ``text``; returns the path in ``out`` where this version is kept."""
    replace(out, text)
    with files.locked(_folder(out)):
        return f"{HISTORY}/{_keep(out, text.encode())}"


def _folder(out: Path) -> Path:
    folder = out / HISTORY
    folder.mkdir(0o700, exist_ok=True)
    return folder


def _keep(out: Path, content: bytes) -> str:
    """Add a version to the history, unless it is the last one there; returns its name."""
    folder, last = out / HISTORY, max(_versions(out), default=0)
    if last and _read(folder / _name(last)) == content:
        return _name(last)
    files.sweep(folder / _name(last + 1))  # left by a killed process
    files.write_bytes(folder / _name(last + 1), content)
    return _name(last + 1)


def _versions(out: Path) -> list[int]:
    return [int(match[1]) for path in (out / HISTORY).iterdir() if (match := _VERSION.fullmatch(path.name))]


def _name(number: int) -> str:
    return f"{number:04}.yaml"


def _read(path: Path) -> bytes | None:
    try:
        return files.read_bytes(path)
    except FileNotFoundError:
        return None
