"""One run directory, one run: a lock that a dead process cannot keep."""

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import IO

from hpclm.errors import HpclmError, LockedError


class Lease:
    """Holds ``folder`` while the block runs; LockedError names the holder when another process has it."""

    def __init__(self, folder: Path):
        self.path = folder / "lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> "Lease":
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise LockedError(
                f"{self.path.parent} is in use by another run ({holder}); wait for it, end it, or give another out="
            ) from None
        except OSError as error:
            raise HpclmError(
                f"{self.path} cannot be locked: {error.strerror}; use a file system with flock for out="
            ) from None
        self._file.truncate(0)
        self._file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        self._file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
