"""How processes end, in words, and that they end with the one that started them."""

import ctypes
import os
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpclm.errors import REQUEUE

PR_SET_PDEATHSIG = 1
LAST = 20  # lines of a dead process's own log that are told


@dataclass(frozen=True)
class End:
    """How a process ended."""

    name: str
    pid: int
    code: int
    """Exit code, or minus the signal that killed it."""
    log: Path | None = None


def with_parent(parent: int) -> Callable[[], None]:
    """What a child of process ``parent`` calls before it becomes a program, to be killed when ``parent`` ends (Linux)."""
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    return ask


def out_of_memory_kills() -> int:
    """Processes that the kernel has killed for lack of memory since this machine started."""
    with suppress(OSError, StopIteration, ValueError), open("/proc/vmstat", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def again(ends: Collection[End]) -> bool:
    """Whether the run that ended so asks to be started again: no rank does so alone, and one that hangs must be killed."""
    codes = {end.code for end in ends}
    return REQUEUE in codes and codes <= {0, REQUEUE, -signal.SIGKILL}


def words(end: End, sent: Collection[int], kills: int) -> str:
    """What ``end`` was, and what may have caused it.

    ``sent``: the signals that the processes were sent on purpose; ``kills``: out_of_memory_kills() when they began.
    """
    who = f"{end.name} (pid {end.pid})"
    see = f"; see {end.log}" if end.log and end.log.exists() else ""
    if end.code >= 0:
        return f"{who} ended with exit code {end.code}{see}"
    number = -end.code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number in sent:
        return f"{who} was ended by {name} before it had begun to train; start it again"
    text = f"{who} was killed by {name}"
    if number == signal.SIGKILL and out_of_memory_kills() > kills:
        text += (
            "; the kernel killed for lack of memory meanwhile: ask for more, or try a smaller batch.micro_size, "
            "engine.recompute=full or fewer processes"
        )
    elif number == signal.SIGKILL:
        text += "; perhaps out of memory: a limit of its container or job, or somebody's kill -9"
    elif number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL):
        text += ": a crash inside a library"
        text += " or a full /dev/shm" * (number == signal.SIGBUS)
    return text + see


def summary(ends: Sequence[End], sent: Collection[int], kills: int) -> list[str]:
    """Words for each of ``ends``; one line for all that ended with the same exit code."""
    told, lines = set(), []
    for end in ends:
        same = [other for other in ends if other.code == end.code]
        if end.code < 0 or len(same) == 1:
            lines.append(words(end, sent, kills))
        elif end.code not in told:
            told.add(end.code)
            lines.append(f"{len(same)} processes ended with exit code {end.code}, {end.name} first")
    return lines
