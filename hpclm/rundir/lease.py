"""The lease of a run directory: only one attempt at a time holds it, and a later attempt can take it over.

The file ``lock`` names the holder and its generation, a number that only grows. The holder keeps the file locked (flock) and
writes a heartbeat to ``lock.beat`` every few seconds. A lock ends with its process. If the holder's node is cut off, or an old
attempt of the same job was not killed, the next attempt takes over with a higher generation. The old attempt checks this before
it publishes anything (fencing, as in Burrows 2006), and exits. Clocks are not compared: a waiting attempt watches for heartbeats.
"""

import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hpclm.base import files
from hpclm.base.errors import MACHINE, HpclmError, LockedError, unread
from hpclm.node.job import OwnJob
from hpclm.rundir import rows
from hpclm.rundir.events import is_job_id
from hpclm.rundir.rows import Row

log = logging.getLogger(__name__)
SECONDS = 30.0  # seconds without a heartbeat after which a holder on another machine counts as dead
FIELDS: dict[str, rows.Kind] = {
    **dict.fromkeys(("host", "machine", "token"), str),
    **dict.fromkeys(("pid", "generation", "start"), int),
    "job": is_job_id,
}
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW


def holder(out: Path | str) -> Row:
    """The last process that held the run directory ``out``: host, pid and more; empty if the lock file cannot be read.

    A holder that has released the run directory has no pid.
    """
    with suppress(OSError):
        return _read_lock(f"{out}/lock")
    return {}


def is_here(record: Mapping[str, Any]) -> bool:
    """Whether the PID in ``record``, of a holder, an attempt or a launch, belongs to this machine; old records have only the host."""
    if record.get("machine"):
        return bool(record["machine"] == files.here())
    return bool(record.get("host") == socket.gethostname())


def shares_locks(holder: Row) -> bool:
    """Whether ``holder`` runs on this kernel, so that flock sees its lock."""
    if holder.get("machine"):
        return files.kernel_of(holder["machine"]) == files.kernel_of(files.here())
    return is_here(holder)


def holder_words(holder: Row) -> str:
    """``holder`` for messages: process 12 on node1, job 3."""
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'unknown')}{job}"


def in_use(folder: Path, holder: Row) -> LockedError:
    """The error for a folder that ``holder`` is using."""
    return LockedError(
        f"{folder} is in use by another run ({holder_words(holder)}); wait for it, end it (hpclm cancel {files.typed(folder)}), "
        "or choose another out="
    )


def refuse_if_held(out: Path) -> None:
    """LockedError if a run holds ``out``. Writes nothing."""
    with suppress(FileNotFoundError), files.reader(out / "lock") as file:
        if not _try_lock(file, out / "lock", fcntl.LOCK_SH):
            raise in_use(out, holder(out))


class Lease:
    """Holds ``folder`` while the block runs; LockedError names the holder if another process has it.

    The lease of an earlier attempt of the same job is taken over: a scheduler restarts a job only after it has given up the
    earlier attempt. The lease of a process on another machine is taken over after ``seconds`` without a heartbeat.
    """

    def __init__(self, folder: Path, seconds: float = SECONDS, job: OwnJob | None = None):
        """``job``: the job of this process, if any."""
        self.path = folder / "lock"
        self._beats = folder / "lock.beat"
        self.seconds = seconds
        self.generation = 0
        """This holder's generation, from 1."""
        job = job or OwnJob()
        self._me: Row = {
            "host": socket.gethostname(),
            "machine": files.here(),
            "pid": os.getpid(),
            "job": job.id or None,
            "start": job.restart,
            "token": secrets.token_hex(8),
        }
        self._file: IO[bytes] | None = None
        self._over = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hpclm-lease", daemon=True)
        os.register_at_fork(after_in_child=self._forget)

    def __enter__(self) -> "Lease":
        waiting = f"waiting for another process that is taking {self.path.parent} over"
        with files.locked(self.path.parent, waiting), self._opened() as file:
            # where the file system cannot lock the folder, the file may have been replaced meanwhile
            free = _try_lock(file, self.path) and os.path.samestat(os.fstat(file.fileno()), self.path.stat())
            last = self._last_holder()
            same_job = self._me["job"] and last.get("job") == self._me["job"]
            given_up = (
                same_job and (last.get("start") or 0) < self._me["start"]
            )  # the job was requeued after that attempt
            if not free and not given_up:
                raise in_use(self.path.parent, last)
            if not free:
                log.warning("taking %s over from %s", self.path.parent, holder_words(last))
            elif not given_up and last.get("host") is not None and not shares_locks(last):
                self._wait_for_silence(last)
            self._take((last.get("generation") or 0) + 1)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        assert self._file is not None
        with suppress(OSError, ValueError), self._file as file:  # the open file: the path may be a newer holder's file
            record = {"generation": self.generation, "job": self._me["job"], "start": self._me["start"]}
            signed_off = json.dumps(record).ljust(os.fstat(file.fileno()).st_size)
            if self.is_mine():
                self._beats.unlink(missing_ok=True)
            os.pwrite(file.fileno(), signed_off.encode(), 0)
            os.fsync(file.fileno())

    @property
    def lost(self) -> bool:
        """Whether this process knows that another attempt has taken over."""
        return self._lost.is_set()

    def check(self) -> None:
        """LockedError if another attempt has taken over, so that this one must not write any more."""
        try:
            mine = self.is_mine()
        except OSError as error:
            text = f"{self.path}, which names the holder of the run directory, cannot be read: {error.strerror}"
            raise HpclmError(text) from error
        if not mine:
            self._lost.set()
            winner = holder_words(holder(self.path.parent))
            raise LockedError(f"{self.path.parent} was taken over by {winner}; this attempt ends without saving")

    def is_mine(self) -> bool:
        """Whether this attempt is still the one that the file names. A missing or damaged file counts as ours."""
        last: Row = {}
        with suppress(FileNotFoundError, files.Unfit):
            last = _read_lock(self.path)
        if "token" in last:
            return bool(last["token"] == self._me["token"])
        return bool((last.get("generation") or 0) <= self.generation)

    def _last_holder(self) -> Row:
        try:
            return _read_lock(self.path)
        except OSError as error:
            if error.errno in MACHINE:  # there may be a holder
                raise unread(error, self.path) from None
            return {}

    def _opened(self) -> IO[bytes]:
        try:
            return os.fdopen(files.opened(self.path, FLAGS, 0o644), "ab+")
        except OSError as error:
            raise HpclmError(f"{self.path} cannot be opened: {error.strerror}; remove it") from error

    def _wait_for_silence(self, holder: Row) -> None:
        """Return after ``seconds`` without a heartbeat of ``holder``; LockedError at a heartbeat. Its locks may be invisible here."""
        text = "waiting %.0f s for a heartbeat of %s, which has not released the run directory"
        log.info(text, self.seconds, holder_words(holder))
        until = time.monotonic() + self.seconds
        first = rows.tail(self._beats)
        while time.monotonic() < until:
            time.sleep(min(1.0, self.seconds / 10))
            if rows.tail(self._beats) != first:
                raise in_use(self.path.parent, holder)

    def _take(self, generation: int) -> None:
        """Replace the file by a new one that is locked and names this holder."""
        self.generation = generation
        new = files.aside(self.path)
        file = os.fdopen(files.opened(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), "wb+")
        try:
            files.lock(file.fileno(), new)
            file.write(json.dumps({"generation": generation, **self._me}).encode())
            file.flush()
            os.fsync(file.fileno())
            new.replace(self.path)
        except OSError as error:
            file.close()
            new.unlink(missing_ok=True)
            raise HpclmError(f"{self.path} cannot be written: {error.strerror}; free space on the disk") from error
        self._file = file
        files.sync(self.path.parent)

    def _beat(self) -> None:
        number = 0
        while not self._over.wait(self.seconds / 6):
            number += 1
            with suppress(OSError, ValueError):
                if not self.is_mine():
                    self._lost.set()
                    return
                files.overwrite(self._beats, f"{self.generation} {number}\n")

    def _forget(self) -> None:
        """Close the file in a forked child, which would keep the lock after this process has exited."""
        if self._file is not None:
            self._file.close()


class HolderWatch:
    """Watches the heartbeats of the process that uses a run directory. Clocks of two machines are never compared."""

    def __init__(self, out: Path):
        self.out = out
        self._last = ""
        self._when = time.monotonic()

    def silent(self) -> tuple[bool, float]:
        """Whether the run directory is free, and the seconds since the last new heartbeat."""
        held = "pid" in holder(self.out)
        beat = rows.tail(self.out / "lock.beat")
        if held and beat != self._last:
            self._last = beat
            self._when = time.monotonic()
        return not held, time.monotonic() - self._when


def _read_lock(path: Path | str) -> Row:
    """The last holder that a lock file names; empty without a name. OSError if the file cannot be read."""
    return rows.parsed(files.read_text(path, errors="replace"), FIELDS) or {}


def _try_lock(file: IO[Any], path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock the open ``file`` at ``path``; False if another process has locked it. HpclmError if the file system has no locks."""
    try:
        files.lock(file.fileno(), path, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise HpclmError(f"{path} cannot be locked: {error.strerror}; use a file system with flock") from None
    return True
