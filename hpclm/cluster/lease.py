"""One run directory, one run: who holds it, in the how-manieth turn, and how a later attempt takes it over.

The file ``lock`` names the holder and its generation, a number that only grows; the holder keeps it locked (flock) and says
every few seconds, in ``lock.beat``, that it lives. A dead process keeps no lock. Where the holder's node is cut off, or an
old attempt of the same job was not killed, the next one takes over with a higher generation; the old one finds out before it
publishes anything (fencing, as Burrows 2006 has it), and ends. Clocks are not compared: who waits counts beats.
"""

import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hpclm import files
from hpclm.cluster.lock import Holder, in_use, parse, read, take, told, whole
from hpclm.errors import HpclmError, LockedError

log = logging.getLogger(__name__)
PATIENCE = 10.0  # seconds with one that is taking over at the same time
SECONDS = 30.0  # without a beat after which a holder on another host counts as gone


class Lease:
    """Holds ``folder`` while the block runs; LockedError names the holder when another process has it.

    What was locked before by an earlier start of the same Slurm job is taken over: Slurm starts a job again only when it has
    given the earlier start up. What a silent process of another host has is taken over after ``seconds``.
    """

    def __init__(self, folder: Path, name: str = "lock", seconds: float = SECONDS, env: Mapping[str, str] = os.environ):
        self.path, self.seconds = folder / name, seconds
        self._beats = folder / f"{name}.beat"
        self.generation = 0
        """Of this holder, from 1."""
        self._me: Holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": env.get("SLURM_JOB_ID"),
            "start": int(env.get("SLURM_RESTART_COUNT") or 0),
            "token": secrets.token_hex(8),
        }
        self._said = ""
        self._file: IO[bytes] | None = None
        self._over = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hpclm-lease", daemon=True)
        os.register_at_fork(after_in_child=self._forget)  # a child must not hold the folder when this process is gone

    def __enter__(self) -> "Lease":
        self._wait_for_turn()
        with self._alone():
            holder = read(self.path)
            free = self._earlier_start(holder) if self._file is None else same_file(self._file, self.path)
            if not free:  # another was quicker
                if self._file is not None:
                    self._file.close()
                raise in_use(self.path.parent, holder)
            if self._file is None:
                log.warning("taking %s over from %s", self.path.parent, told(holder))
            self._take(whole(holder, "generation") + 1)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._file is not None:
            with suppress(OSError):  # into the open file: what another attempt has put in its place meanwhile stays
                known = {"generation": self.generation, "job": self._me["job"], "start": self._me["start"]}
                signed_off = json.dumps(known).ljust(len(self._said))
                if self._mine():
                    self._beats.unlink(missing_ok=True)
                os.pwrite(self._file.fileno(), signed_off.encode(), 0)
                os.fsync(self._file.fileno())
            self._file.close()

    @property
    def lost(self) -> bool:
        """Whether another attempt is known to have taken over."""
        return self._lost.is_set()

    def check(self) -> None:
        """LockedError when another attempt has taken over: this one must not write any more."""
        try:
            mine = self._mine()
        except OSError as error:
            raise HpclmError(
                f"{self.path} cannot be read: {error.strerror}; it says whose the run directory is"
            ) from error
        if not mine:
            self._lost.set()
            raise LockedError(
                f"{self.path.parent} was taken over by {told(read(self.path))}; this attempt ends without saving"
            )

    def _mine(self) -> bool:
        """Whether nobody else has put a name into the file; who finds it gone or spoilt makes a new one, or leaves it be."""
        text = ""
        with suppress(FileNotFoundError):
            text = self.path.read_text(encoding="utf-8", errors="replace")
        found = parse(text)
        if "token" in found:
            return bool(found["token"] == self._me["token"])
        return whole(found, "generation") <= self.generation

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two that take over at once do so one after the other, where the file system can lock a folder."""
        handle, until = os.open(self.path.parent, os.O_RDONLY), time.monotonic() + PATIENCE
        try:
            while time.monotonic() < until:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # for milliseconds, unless that process was stopped in the middle
                    time.sleep(0.01)
                except OSError:
                    break
            yield
        finally:
            os.close(handle)

    def _wait_for_turn(self) -> None:
        """Return once it is certain that the last holder is none any more; LockedError while it is one.

        Afterwards its file is locked by this process, or belongs to an earlier start of this job.
        """
        while True:
            try:
                file = self.path.open("ab+")
            except OSError as error:
                raise HpclmError(f"{self.path} cannot be opened: {error.strerror}; remove it") from error
            if not take(file):
                file.close()
                holder = read(self.path)
                if self._earlier_start(holder):
                    return
                raise in_use(self.path.parent, holder)
            if not same_file(file, self.path):  # somebody has put another in its place
                file.close()
                continue
            self._file = file
            holder = read(self.path)
            elsewhere = holder.get("host") not in (None, self._me["host"])
            if elsewhere and not self._earlier_start(holder):
                self._wait_for_silence(holder)
            return

    def _earlier_start(self, holder: Holder) -> bool:
        """Whether ``holder`` is this very job, before Slurm started it again."""
        return bool(self._me["job"]) and (
            holder.get("job") == self._me["job"] and whole(holder, "start") < self._me["start"]
        )

    def _wait_for_silence(self, holder: Holder) -> None:
        """Return when ``holder``, on a host whose processes cannot be seen, has said nothing for long enough."""
        log.info("waiting %.0f s whether %s, which did not sign off, still lives", self.seconds, told(holder))
        until, first = time.monotonic() + self.seconds, self._last_beat()
        while time.monotonic() < until:
            time.sleep(min(1.0, self.seconds / 10))
            if self._last_beat() != first:
                assert self._file is not None
                self._file.close()
                raise in_use(self.path.parent, holder)

    def _take(self, generation: int) -> None:
        """Put a file of this holder's, locked, in the place of the last one's."""
        self.generation = generation
        new = files.aside(self.path)
        file = new.open("wb+")
        fcntl.flock(file, fcntl.LOCK_EX)
        self._said = json.dumps({"generation": generation, **self._me})
        try:
            file.write(self._said.encode())
            file.flush()
            os.fsync(file.fileno())
            new.replace(self.path)
        except OSError as error:
            file.close()
            new.unlink(missing_ok=True)
            raise HpclmError(f"{self.path} cannot be written: {error.strerror}; free the disk") from error
        if self._file is not None:
            self._file.close()
        self._file = file
        files.sync(self.path.parent)

    def _beat(self) -> None:
        number = 0
        while not self._over.wait(self.seconds / 6):
            number += 1
            with suppress(OSError, ValueError):
                if not self._mine():
                    self._lost.set()
                    return
                self._beats.write_text(f"{self.generation} {number}\n")

    def _last_beat(self) -> str:
        try:
            return self._beats.read_text()
        except OSError:
            return ""

    def _forget(self) -> None:
        if self._file is not None and not self._file.closed:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, self._file.fileno(), inheritable=False)
            os.close(nothing)


def same_file(file: IO[bytes], path: Path) -> bool:
    """Whether ``path`` still is the open ``file``."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
