"""A run's config.yaml, and copies of its versions: config-history/0001.yaml and so on."""

import re
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

from hpclm.base import files
from hpclm.base.errors import ConfigError
from hpclm.base.side_path import SidePath
from hpclm.config import compose
from hpclm.config.run_file import HISTORY, NAME
from hpclm.rundir import events, runs

VERSION = re.compile(r"(?!0000)([0-9]{4}|[1-9][0-9]{4,8})\.yaml")
"""Names of versions. hpclm leaves other files in the folder alone."""


def replace(out: Path, text: str) -> tuple[bytes | None, str]:
    """Make ``text`` the config.yaml of ``out``; returns the previous content, and the path of the new copy in the
    history; the path is empty if no copy could be made."""
    folder = out / HISTORY
    new = text.encode()
    kept = list[str]()
    history = SidePath(f"this version of {NAME} is not kept in {folder}")
    with ExitStack() as stack:

        def lock() -> None:
            folder.mkdir(0o700, exist_ok=True)
            stack.enter_context(files.locked(folder))

        usable = history.attempt(lock)
        before = None
        versions = [new]
        if (out / NAME).exists():
            before = files.read_bytes(out / NAME)
            versions = [before, new]
        if not usable or not history.attempt(lambda: kept.extend(_keep(folder, version) for version in versions)):
            kept = []
        if before != new:
            files.write_bytes(out / NAME, new)
    return before, f"{HISTORY}/{kept[-1]}" if kept else ""


def restore(out: Path, before: bytes | None) -> None:
    """Undo ``replace``. ``before``: the content that it returned."""
    if before is None:
        (out / NAME).unlink(missing_ok=True)
    else:
        files.write_bytes(out / NAME, before)


def keep_list(out: Path, name: str, text: str) -> str:
    """Keep a list of documents that training leaves out, in the history as ``name``; returns its path in ``out``. OSError if it cannot
    be written: without it, nobody could tell what the run has read."""
    folder = out / HISTORY
    folder.mkdir(0o700, exist_ok=True)
    files.write_text(folder / name, text)
    return f"{HISTORY}/{name}"


def micro_size(out: Path, context: int | None = None) -> int | None:
    """The batch.micro_size of the last attempt in the run directory ``out``; None if it is unknown, or if the attempt had another
    model.context than ``context``."""
    attempt = runs.read_run(out).attempt
    size = attempt.get("micro_size")
    if not size or context not in (None, attempt.get("context", context)):
        return None
    return int(size)


def split_by(out: Path) -> Literal["documents", "tokens"] | None:
    """The data.split_by of the last attempt in the run directory ``out``; None without one, or if its settings cannot be read."""
    by: Literal["documents", "tokens"] | None = None
    attempts = events.attempts(events.read_or_refuse(out))
    if attempts:
        with suppress(ConfigError):
            by = compose.flat_of_run(out, str(attempts[-1].began.get("config") or NAME)).get("data.split_by")
    return by


def _keep(folder: Path, content: bytes) -> str:
    """Copy ``content`` to the history, unless the last version there has it already; returns the version's name."""
    last = max((int(path.stem) for path in folder.iterdir() if VERSION.fullmatch(path.name)), default=0)
    with suppress(OSError):  # a version that cannot be read stays there, and the next number is taken
        if last and files.read_bytes(folder / f"{last:04}.yaml") == content:
            return f"{last:04}.yaml"
    new = folder / f"{last + 1:04}.yaml"
    files.sweep(new)  # left by a killed process
    files.write_bytes(new, content)
    return new.name
