"""The processes that this one has started, and those they have."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """Become the parent of descendants whose own parent ends, so that ``kill`` finds them (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(of: int) -> list[int]:
    """Process numbers of all descendants of process ``of``, parents first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, todo = [], [of]
    while todo:
        own = children.get(todo.pop(), [])
        found += own
        todo += own
    return found


def kill(of: int | None = None) -> int:
    """Kill all descendants of process ``of`` (this one), again until there are none that live; gives how many it met."""
    met: set[int] = set()
    for _ in range(20):
        living = [pid for pid in descendants(of or os.getpid()) if pid not in met]
        if not living:
            break
        for pid in living:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        met |= set(living)
    return len(met)
