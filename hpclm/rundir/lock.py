"""A lock on a folder, released when its process ends; its owner, and whether the owner is alive."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hpclm import files
from hpclm.errors import HpclmError, LockedError
from hpclm.node.job import Job
from hpclm.rundir import rows
from hpclm.rundir.events import is_job_id

Holder = dict[str, Any]
FIELDS: dict[str, rows.Kind] = {
    **dict.fromkeys(("host", "machine", "token"), str),
    **dict.fromkeys(("pid", "generation", "start"), int),
    "job": is_job_id,
}
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW


def read(path: Path | str) -> Holder:
    """The last holder that a lock file names: host, pid and more; empty without one, and for a file that cannot be read."""
    with suppress(OSError):
        return named(path)
    return {}


def named(path: Path | str) -> Holder:
    """The last holder that a lock file names; empty if it names none. OSError if it cannot be read."""
    return rows.parsed(files.read_text(path, errors="replace"), FIELDS) or {}


def holder(path: Path | str) -> Holder | None:
    """The process that a lock file names as using the run directory; None if there is none, or it has released the folder."""
    last = read(path)
    return last if last.get("pid") else None


def is_here(record: Mapping[str, Any]) -> bool:
    """Whether the PID in a record (a holder, an attempt or a launch) is one of this machine; a record need only have the host."""
    machine = record.get("machine")
    return bool(machine == files.here() if machine else record.get("host") == socket.gethostname())


def shares_locks(holder: Holder) -> bool:
    """Whether a lock of ``holder``, if it still had one, would be visible here for certain: it runs on the same kernel."""
    machine = holder.get("machine")
    return files.kernel_of(machine) == files.kernel_of(files.here()) if machine else is_here(holder)


def described(holder: Holder) -> str:
    """A holder, for messages."""
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'unknown')}{job}"


def in_use(folder: Path, holder: Holder) -> LockedError:
    """The error for a folder that ``holder`` is using."""
    return LockedError(
        f"{folder} is in use by another run ({described(holder)}); wait for it, end it (hpclm cancel {files.typed(folder)}), "
        "or choose another out="
    )


def try_lock(file: IO[Any], path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock ``file``, which is open, at ``path``; False if another process has. HpclmError if the file system has no locks."""
    try:
        files.lock(file.fileno(), path, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise HpclmError(f"{path} cannot be locked: {error.strerror}; use a file system with flock") from None
    return True


def refuse_if_held(folder: Path, name: str = "lock") -> None:
    """LockedError if another process holds ``folder``; nothing is written."""
    with suppress(FileNotFoundError), files.reader(folder / name) as file:
        if not try_lock(file, folder / name, fcntl.LOCK_SH):
            raise in_use(folder, read(folder / name))


@contextmanager
def held(folder: Path, name: str, job: Job) -> Iterator[None]:
    """Hold ``folder`` by the file ``name`` in it during the block, from the job ``job``; LockedError names the holder if another process has it."""
    with os.fdopen(files.opened(folder / name, FLAGS), "a+") as file:
        if not try_lock(file, folder / name):
            raise in_use(folder, read(folder / name))
        file.truncate(0)
        file.write(
            json.dumps(
                {
                    "host": socket.gethostname(),
                    "machine": files.here(),
                    "pid": os.getpid(),
                    "job": job.row().get("job_id"),
                }
            )
        )
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


class HolderWatch:
    """Watches whether a process still uses a run directory, by its lease; clocks of two machines are never compared."""

    def __init__(self, out: Path):
        self.out = out
        self._last, self._when = "", time.monotonic()

    def silent(self) -> tuple[bool, float]:
        """Whether no process holds the run directory (any more), and the seconds since the last heartbeat."""
        process, beat = holder(self.out / "lock"), rows.tail(self.out / "lock.beat")
        if process and beat != self._last:
            self._last, self._when = beat, time.monotonic()
        return not process, time.monotonic() - self._when
