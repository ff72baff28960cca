"""Processes of a trial: forked from one that has loaded PyTorch, waited for, and killed where they hang."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpclm import files
from hpclm.node import preemption
from hpclm.node.parent import signal_at_death_of_parent

PAUSE = 0.02  # seconds between two looks at the processes
GRACE = 10.0  # seconds that the others have once one has failed
LIMIT = 180.0  # seconds after which a trial hangs
HUNG = -1
"""The code of a process that was killed because it hung."""


def run(count: int, work: Callable[[int], int], output: Path, limit: float = LIMIT) -> list[int]:
    """``work(rank)`` in ``count`` processes, which print into the file ``output``; their exit codes, or minus the signal that killed one.

    One that has not ended after ``limit`` seconds, or ``GRACE`` after another has failed, is killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    running = {_forked(rank, work, output): rank for rank in range(count)}
    codes = [0] * count
    until = time.monotonic() + limit
    try:
        while running:
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[running[pid]] = code = os.waitstatus_to_exitcode(status)
                    del running[pid]
                    until = min(until, time.monotonic() + GRACE) if code else until
            if running and time.monotonic() > until:
                for rank in running.values():
                    codes[rank] = HUNG
                break
            time.sleep(PAUSE if running else 0)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


def _forked(rank: int, work: Callable[[int], int], output: Path) -> int:
    """The process that does ``work(rank)``."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.set_wakeup_fd(-1)  # which tells the process above of its signals, not of this one's
        preemption.end_at_once()
        signal_at_death_of_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        handle = files.appending(output, 0o600)
        for stream in (1, 2):
            os.dup2(handle, stream)
        code = work(rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
