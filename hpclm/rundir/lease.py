"""The lease of a run directory: only one attempt at a time holds it, and a later attempt can take it over.

The file ``lock`` names the holder and its generation, a number that only grows. The holder keeps the file locked (flock) and
writes a heartbeat to ``lock.beat`` every few seconds. A lock ends with its process. If the holder's node is cut off, or an old
attempt of the same job was not killed, the next attempt takes over with a higher generation. The old one checks before it
publishes anything (fencing, as in Burrows 2006), and exits. Clocks are not compared: a waiting attempt watches for heartbeats.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from hpclm import files
from hpclm.errors import MACHINE, HpclmError, LockedError, unread
from hpclm.node.job import Job
from hpclm.rundir import rows
from hpclm.rundir.lock import (
    FIELDS,
    FLAGS,
    Holder,
    described,
    in_use,
    named,
    read,
    shares_locks,
    try_lock,
)

log = logging.getLogger(__name__)
SECONDS = 30.0  # without a heartbeat after which a holder on another machine counts as dead


class Lease:
    """Holds ``folder`` while the block runs; LockedError names the holder if another process has it.

    The lease of an earlier attempt of the same job is taken over: a scheduler restarts a job only after it has given up the
    earlier attempt. The lease of a process on another machine is taken over after ``seconds`` without a heartbeat.
    """

    def __init__(self, folder: Path, seconds: float = SECONDS, job: Job | None = None):
        """``job``: that this process is part of."""
        self.path, self._beats, self.seconds = folder / "lock", folder / "lock.beat", seconds
        self.generation = 0
        """Of this holder, from 1."""
        identity = job and job.identity
        self._me: Holder = {
            "host": socket.gethostname(),
            "machine": files.here(),
            "pid": os.getpid(),
            "job": identity and identity.id,
            "start": identity.restart if identity else 0,
            "token": secrets.token_hex(8),
        }
        self._file: IO[bytes] | None = None
        self._over = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hpclm-lease", daemon=True)
        os.register_at_fork(after_in_child=self._forget)

    def __enter__(self) -> "Lease":
        waiting = f"waiting for another process, which is taking {self.path.parent} over"
        with files.locked(self.path.parent, waiting), self._opened() as file:
            # not free: the file was replaced meanwhile, where the file system cannot lock the folder
            free = try_lock(file, self.path) and os.path.samestat(os.fstat(file.fileno()), self.path.stat())
            holder = self._last_holder()
            # this job before its last requeue
            given_up = (
                self._me["job"]
                and holder.get("job") == self._me["job"]
                and (holder.get("start") or 0) < self._me["start"]
            )
            if not free and not given_up:
                raise in_use(self.path.parent, holder)
            if not free:
                log.warning("taking %s over from %s", self.path.parent, described(holder))
            elif not given_up and holder.get("host") is not None and not shares_locks(holder):
                self._wait_for_silence(holder)
            self._take((holder.get("generation") or 0) + 1)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        assert self._file is not None
        with suppress(OSError, ValueError), self._file as file:  # the open file: that of a newer holder is not touched
            record = {"generation": self.generation, "job": self._me["job"], "start": self._me["start"]}
            signed_off = json.dumps(record).ljust(os.fstat(file.fileno()).st_size)
            if self.is_mine():
                self._beats.unlink(missing_ok=True)
            os.pwrite(file.fileno(), signed_off.encode(), 0)
            os.fsync(file.fileno())

    @property
    def lost(self) -> bool:
        """Whether another attempt has taken over, as far as is known."""
        return self._lost.is_set()

    def check(self) -> None:
        """LockedError if another attempt has taken over: this one must not write any more."""
        try:
            mine = self.is_mine()
        except OSError as error:
            text = f"{self.path} cannot be read: {error.strerror}; it names the holder of the run directory"
            raise HpclmError(text) from error
        if not mine:
            self._lost.set()
            winner = described(read(self.path))
            raise LockedError(f"{self.path.parent} was taken over by {winner}; this attempt ends without saving")

    def is_mine(self) -> bool:
        """Whether no other attempt has written its name to the file. A missing or damaged file counts as ours."""
        text = ""
        with suppress(FileNotFoundError, files.Unfit):
            text = files.read_text(self.path, errors="replace")
        named = rows.parsed(text, FIELDS) or {}
        if "token" in named:
            return bool(named["token"] == self._me["token"])
        return bool((named.get("generation") or 0) <= self.generation)

    def _last_holder(self) -> Holder:
        try:
            return named(self.path)
        except OSError as error:
            if error.errno in MACHINE:  # not the same as none, which would not be waited for
                raise unread(error, self.path) from None
            return {}

    def _opened(self) -> IO[bytes]:
        try:
            return os.fdopen(files.opened(self.path, FLAGS, 0o644), "ab+")
        except OSError as error:
            raise HpclmError(f"{self.path} cannot be opened: {error.strerror}; remove it") from error

    def _wait_for_silence(self, holder: Holder) -> None:
        """Return when ``holder``, on a machine whose locks may not be visible, has sent no heartbeat for long enough."""
        text = "waiting %.0f s for a heartbeat of %s, which has not released the run directory"
        log.info(text, self.seconds, described(holder))
        until, first = time.monotonic() + self.seconds, rows.tail(self._beats)
        while time.monotonic() < until:
            time.sleep(min(1.0, self.seconds / 10))
            if rows.tail(self._beats) != first:
                raise in_use(self.path.parent, holder)

    def _take(self, generation: int) -> None:
        """Replace the file by one that is locked and names this holder."""
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
            raise HpclmError(f"{self.path} cannot be written: {error.strerror}; free the disk") from error
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
        """In a forked child, which must not keep the lock when this process has exited."""
        if self._file is not None:
            self._file.close()
