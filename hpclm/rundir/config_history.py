"""A run's config.yaml, and copies of its earlier versions: config-history/0001.yaml and so on."""

import re
from pathlib import Path

from hpclm import files
from hpclm.config.run_file import HISTORY, NAME

_VERSION = re.compile(r"(\d{4,})\.yaml")


def replace(out: Path, text: str) -> bytes | None:
    """Make ``text`` the config.yaml of the run directory ``out``; returns the one before it, which is kept in the history."""
    folder = out / HISTORY
    folder.mkdir(0o700, exist_ok=True)
    with files.locked(folder):
        before = _content(out / NAME)
        if before is not None:
            _keep(folder, before)
        if before != text.encode():
            files.write_text(out / NAME, text)
    return before


def restore(out: Path, before: bytes | None) -> None:
    """Undo a ``replace``, given what it returned."""
    if before is None:
        (out / NAME).unlink(missing_ok=True)
    else:
        files.write_bytes(out / NAME, before)


def use(out: Path, text: str) -> str:
    """As ``replace``, for an attempt that trains with ``text``; returns the path in ``out`` where this version is kept."""
    replace(out, text)
    with files.locked(out / HISTORY):
        return f"{HISTORY}/{_keep(out / HISTORY, text.encode())}"


def _keep(folder: Path, content: bytes) -> str:
    """Copy a version to the history, unless it is the last one there; returns its name."""
    last = max((int(match[1]) for path in folder.iterdir() if (match := _VERSION.fullmatch(path.name))), default=0)
    if last and _content(folder / f"{last:04}.yaml") == content:
        return f"{last:04}.yaml"
    new = folder / f"{last + 1:04}.yaml"
    files.sweep(new)  # left by a killed process
    files.write_bytes(new, content)
    return new.name


def _content(path: Path) -> bytes | None:
    try:
        return files.read_bytes(path)
    except FileNotFoundError:
        return None
