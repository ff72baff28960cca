"""One run directory, one run: a lock that a dead process cannot keep."""

import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from hpclm.errors import HpclmError, LockedError


def refuse_if_held(folder: Path, name: str = "lock") -> None:
    """LockedError where another process holds ``folder``; nothing is written, and nobody's name is wiped out."""
    with suppress(FileNotFoundError), (folder / name).open("r", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(folder, file.read()) from None
        except OSError as error:
            raise HpclmError(
                f"{folder / name} cannot be locked: {error.strerror}; use a file system with flock"
            ) from None


def in_use(folder: Path, holder: str) -> LockedError:
    """The error for a folder that ``holder`` has."""
    who = holder.strip() or "unknown"
    return LockedError(f"{folder} is in use by another run ({who}); wait for it, end it, or give another out=")


class Lease:
    """Holds ``folder`` while the block runs; LockedError names the holder when another process has it."""

    def __init__(self, folder: Path, name: str = "lock"):
        self.path = folder / name
        self._file: IO[str] | None = None
        os.register_at_fork(after_in_child=self._forget)  # a child must not hold the folder when this process is gone

    def __enter__(self) -> "Lease":
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read()
            self._file.close()
            raise in_use(self.path.parent, holder) from None
        except OSError as error:
            raise HpclmError(
                f"{self.path} cannot be locked: {error.strerror}; use a file system with flock for out="
            ) from None
        self._file.truncate(0)
        self._file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        self._file.flush()
        return self

    def _forget(self) -> None:
        if self._file is not None and not self._file.closed:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, self._file.fileno(), inheritable=False)
            os.close(nothing)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
