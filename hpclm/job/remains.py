"""End what a process has started, all of it."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from hpclm.cluster import children

STUCK = (
    10.0  # seconds after which a process that SIGKILL did not end is given up: it waits in the kernel, for a dead disk
)
PAUSE = 0.02  # seconds between two looks


def end(
    keep: frozenset[int] = frozenset(), quiet: float = 1.0, grace: float = 2.0, reap: Callable[[], None] | None = None
) -> set[int]:
    """End all descendants of this process but ``keep``; gives the numbers of those that did not end by themselves.

    They have ``quiet`` seconds to end by themselves, then SIGTERM and ``grace`` seconds, then SIGKILL. Those that start
    meanwhile end too. ``reap`` collects this process's dead children, where it keeps count of them.
    """
    began = time.monotonic()
    told: set[int] = set()
    while True:
        left = [pid for pid in children.descendants(os.getpid()) if pid not in keep]
        reap() if reap else _reap(left)
        left = [pid for pid in left if _lives(pid)]
        waited = time.monotonic() - began
        if not left or waited > quiet + grace + STUCK:
            return told
        if waited >= quiet:
            last = waited >= quiet + grace
            for pid in left if last else set(left) - told:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if last else signal.SIGTERM)
            told |= set(left)
        time.sleep(PAUSE)


def _reap(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    return False
