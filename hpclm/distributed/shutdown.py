"""How a rank exits after a failure of the run: the failure is logged once, its children are killed, and it exits."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from hpclm import files
from hpclm.distributed.rendezvous import RankInfo, rank_key
from hpclm.distributed.store import JsonStore
from hpclm.node import ends, processes
from hpclm.terminal import plain

log = logging.getLogger(__name__)
LOGGED = "hpclm/logged"
LATEST = 3.0  # seconds until this process exits, even if a lock or a dead disk blocks it
PATIENCE = 2.0  # seconds for rank 0 to write the cause into the log
TAIL = 1 << 17  # bytes at the end of the log that are searched for the failure


class Shutdown:
    """Logs what ended the run, and ends this process; one of its threads does so."""

    def __init__(self, me: RankInfo, ranks: Sequence[RankInfo], marker: Mapping[str, str] = MappingProxyType({})):
        """``marker``: variables and values in the environment of everything that this launch has started."""
        self.me, self.ranks, self.marker = me, ranks, marker
        self.log: Path | None = None
        """The run's log, once it exists; rank 0's handler writes there too."""
        self.listeners: list[Callable[[str], None]] = []
        """Hear of the cause, and pass it on within seconds."""
        self.recorded: Callable[[], str] = str
        """The cause that a rank has recorded for this attempt; empty without one."""
        self._once = threading.Lock()

    def claim(self) -> bool:
        """Whether the calling thread is the one that ends this process."""
        # main thread and watchdog may both want to end the process, with different reasons; the first one's counts
        return self._once.acquire(blocking=False)

    def log_failure(self, text: str, store: JsonStore | None = None) -> None:
        """Log ``text``; if rank 0 does not (it sets a key in ``store``), append it to the run's log too.

        Where a rank has recorded a cause already, that one is final: what this rank saw is a consequence.
        """
        if cause := self.recorded():
            log.info("the run has ended: %s", cause)
            return
        if self.me.rank == 0 or self.log is not None:  # on other ranks it would only be repeated on the console
            log.error(text)
        logged = False
        with suppress(RuntimeError):
            if store is not None and self.me.rank == 0:
                store.set(LOGGED, True)
            elif store is not None:
                logged = store.wait(LOGGED, PATIENCE) is not None
        if self.me.rank:
            if not logged and self.log is None:
                log.error(text)
            with suppress(OSError):
                logged = logged or self.log is None or not _append_once(self.log, text)
            if logged:
                return
        for listener in self.listeners:
            listener(text)

    def wait_for_others(self, store: JsonStore | None) -> None:
        """On rank 0, whose end closes the store: wait a moment until the others have read the failure."""
        if self.me.rank == 0 and store is not None:
            with suppress(RuntimeError):
                keys = [rank_key("read", info.rank) for info in self.ranks if info.rank]
                processes.wait_until(lambda: all(store.get_all(keys) or [False]), PATIENCE)

    def clean_up(self) -> None:
        """Kill this rank's children, and orphans of killed ranks on this machine."""
        processes.kill_children()
        if self.marker:
            near = [info for info in self.ranks if info.machine == self.me.machine or info.host == self.me.host]
            processes.kill_strays(self.marker, [info.pid for info in near])

    def exit(self, text: str, code: int, store: JsonStore | None = None) -> NoReturn:
        """Log the cause and end this process with ``code``; the main thread may never return from where it is."""
        exit_after(LATEST, code)
        ends.note(code, text)
        self.clean_up()
        if text:
            self.log_failure(text, store)
        self.wait_for_others(store)
        with suppress(OSError, ValueError):  # the launcher, which read them, may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        # not sys.exit: the interpreter would wait for the main thread, which may hang in a collective
        os._exit(code)


def exit_after(seconds: float, code: int) -> None:
    """End this process with ``code`` after ``seconds``."""
    late = threading.Timer(seconds, os._exit, args=(code,))
    late.daemon = True
    late.start()


def _append_once(path: Path, text: str) -> bool:
    """Append a line to the log, unless another rank did; whether this one did."""
    entry = plain(text).encode(errors="backslashreplace")
    # no link: one in place of the log could lead anywhere
    handle = files.opened(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
    # of the ranks that all find rank 0 dead, the first one writes
    with files.locked(path), os.fdopen(handle, "ab+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        if entry in file.read():
            return False
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} E ".encode() + entry + b"\n")
    return True
