"""Fork the processes of a trial from one that has loaded PyTorch, wait for them, and kill those that hang."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpclm.base import files
from hpclm.node import preemption
from hpclm.node.parent import signal_at_death_of_parent

PAUSE = 0.02  # seconds between checks of the processes
GRACE = 10.0  # seconds for the other processes to end once one has failed
LIMIT = 180.0  # seconds after which a trial counts as hung
HUNG = -1
"""Exit code of a process that was killed because it hung."""


def run(count: int, work: Callable[[int], int], output: Path, limit: float = LIMIT) -> list[int]:
    """Run ``work(rank)`` in ``count`` processes, which print into the file ``output``. Returns their exit codes, negative for a signal.

    A process that has not ended after ``limit`` seconds, or ``GRACE`` seconds after another has failed, is killed.
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
                    code = os.waitstatus_to_exitcode(status)
                    codes[running.pop(pid)] = code
                    if code:
                        until = min(until, time.monotonic() + GRACE)
            if running and time.monotonic() > until:
                for rank in running.values():
                    codes[rank] = HUNG
                break
            if running:
                time.sleep(PAUSE)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


def _forked(rank: int, work: Callable[[int], int], output: Path) -> int:
    """Fork the process that runs ``work(rank)``; returns its pid."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.set_wakeup_fd(-1)  # the inherited one would report this process's signals to the parent
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
