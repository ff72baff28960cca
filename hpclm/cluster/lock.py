"""A lock on a folder that a dead process cannot keep."""

import fcntl
import json
import os
import shlex
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hpclm.errors import HpclmError, LockedError

Holder = dict[str, Any]


def refuse_if_held(folder: Path, name: str = "lock") -> None:
    """LockedError where another process holds ``folder``; nothing is written, and nobody's name is wiped out."""
    with suppress(FileNotFoundError), (folder / name).open("r", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(folder, read(folder / name)) from None
        except OSError as error:
            raise HpclmError(
                f"{folder / name} cannot be locked: {error.strerror}; use a file system with flock"
            ) from None


def in_use(folder: Path, holder: Holder) -> LockedError:
    """The error for a folder that ``holder`` has."""
    return LockedError(
        f"{folder} is in use by another run ({told(holder)}); wait for it, end it (hpclm cancel {shlex.quote(str(folder))}), "
        "or give another out="
    )


def read(path: Path) -> Holder:
    """What a lock file says of its holder: host, pid and more; empty where it says nothing."""
    with suppress(OSError):
        return parse(path.read_text(encoding="utf-8", errors="replace"))
    return {}


def parse(text: str) -> Holder:
    """The same, of what such a file holds."""
    with suppress(ValueError, RecursionError):
        content = json.loads(text)
        return content if isinstance(content, dict) else {}
    return {}


def whole(holder: Holder, name: str) -> int:
    """A number that a lock file says; 0 where it says none."""
    value = holder.get(name)
    return value if isinstance(value, int) and 0 < value < 1 << 53 else 0


def told(holder: Holder) -> str:
    """A holder in words."""
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'unknown')}{job}"


class Lock:
    """Holds ``folder``, by the file ``name`` in it, while the block runs; LockedError names the holder when another has it."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.path = folder, folder / name
        self._file: IO[str] | None = None

    def __enter__(self) -> "Lock":
        self._file = self.path.open("a+", encoding="utf-8")
        if not take(self._file):
            self._file.close()
            raise in_use(self.folder, read(self.path))
        self._file.truncate(0)
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID")}
        self._file.write(json.dumps(holder))
        self._file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()


def take(file: IO[Any]) -> bool:
    """Lock an open file; False where another process has. HpclmError where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise HpclmError(f"{file.name} cannot be locked: {error.strerror}; use a file system with flock") from None
    return True
