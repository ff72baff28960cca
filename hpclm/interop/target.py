"""A folder that is there when all of it is written, and not before."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpclm import files
from hpclm.errors import ConfigError, unwritten


@contextmanager
def fresh(target: Path, mode: int = 0o777) -> Iterator[Path]:
    """A folder to write into that becomes ``target`` at the end of the block, or goes away where the block fails."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} is there already; give another place, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.sweep(target)
        draft = files.aside(target)
        draft.mkdir(mode)
    except OSError as error:
        raise unwritten(error, target, "choose another place") from error
    try:
        yield draft
        for path in (*draft.rglob("*"), draft):
            files.sync(path)
        if target.exists():  # made by another process in the meantime
            raise ConfigError(f"{target} is there already; give another place, or remove it")
        draft.rename(target)
        files.sync(target.parent)
    except OSError as error:
        raise unwritten(error, target, "nothing was left there") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
