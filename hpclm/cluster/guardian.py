"""A small process beside each rank that outlives it, and ends what the rank has started when the rank is gone.

A rank that is killed cannot clean up, and not every launcher does: mpirun leaves the children of a killed rank alone. The
guardian knows them by a mark in their environment, which programs that are started inherit, and by having seen them as
descendants, which covers forks that keep their parent's environment. It needs /proc.
"""

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "HPCLM_GUARD"
LOOK = 0.5  # seconds between looks at the descendants


def post() -> int:
    """Start a guardian over this process, and mark what it starts from now on; gives the guardian's process number."""
    mark = secrets.token_hex(8)
    os.environ[MARK] = mark
    reading, writing = os.pipe()
    os.set_inheritable(writing, False)
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(os.getpid())],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={"PATH": os.environ.get("PATH", "")},
        cwd="/",
    )
    os.close(reading)
    return guardian.pid  # the pipe stays open as long as this process lives


def born(pid: int) -> tuple[int, int] | None:
    """Parent and start time (clock ticks since boot) of a process, which with its number names it; None when it is gone."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[1]), int(fields[19])
    return None


def watch(mark: str, rank: int) -> None:
    """Wait until process ``rank`` ends, then kill what it has left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    seen: dict[int, int] = {}
    try:
        ended = os.pidfd_open(rank)
    except ProcessLookupError:
        ended = 0  # standard input, whose other end the rank had
    except (AttributeError, OSError):  # an old kernel; a fork of the rank may then keep the pipe open after its end
        ended = 0
    while not select.select([ended], [], [], LOOK)[0]:
        seen |= {pid: facts[1] for pid in descendants(rank) if pid != os.getpid() and (facts := born(pid))}
    for _ in range(10):
        left = [pid for pid, start in seen.items() if (now := born(pid)) and now[1] == start] + _marked(mark)
        if not left:
            break
        for pid in set(left):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def descendants(of: int) -> list[int]:
    """Descendants of process ``of``, as the kernel lists them."""
    found, todo = [], [of]
    while todo:
        own: list[int] = []
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with suppress(OSError):
                own += map(int, task.read_text().split())
        found += own
        todo += own
    return found


def _marked(mark: str) -> list[int]:
    """Processes that carry the mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]))
