"""A small process beside each rank that outlives it, and ends what the rank has started when the rank is gone.

A rank that is killed cannot clean up, and not every launcher does: mpirun leaves the children of a killed rank alone. The
guardian knows them by a mark in their environment, which programs that are started inherit, and by having seen them as
descendants, which covers forks that keep their parent's environment. It needs /proc.

It also wakes a rank that a signal has stopped once the others have hung up on it: they have given the run up, and the rank
must tell where it was, and end. One that does not even then is killed.
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
STUBBORN = 10.0  # seconds that a stopped rank has to end after it was woken
DEAF = 20.0  # seconds that one has which runs, but does not notice that all have left
SELDOM = 5.0  # seconds between looks at the connections of a rank that runs
CLOSE_WAIT = "08"  # the other end is closed, as /proc/net/tcp says it


def post() -> int:
    """Start a guardian over this process, and mark what it starts from now on; gives the pipe to it, for ``tell``."""
    mark = secrets.token_hex(8)
    os.environ[MARK] = mark
    reading, writing = os.pipe()
    os.set_inheritable(writing, False)
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(os.getpid())],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={"PATH": os.environ.get("PATH", "")},
        cwd="/",
    )
    os.close(reading)
    return writing  # it stays open as long as this process lives


def tell(pipe: int, *sockets: int) -> None:
    """Tell the guardian the inodes of this rank's connections to the others; none: it is leaving, and needs no waking."""
    with suppress(OSError):
        os.write(pipe, (" ".join(map(str, sockets)) + "\n").encode())


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
    waiting, told, left = {ended, 0}, b"", Left(rank)
    while ended not in (ready := select.select(waiting, [], [], LOOK)[0]) or ended == 0:
        if 0 in ready:
            read = os.read(0, 1 << 16)
            if not read and ended == 0:
                break
            if not read:
                waiting.discard(0)
            *lines, told = (told + read).split(b"\n")
            if lines:
                left.sockets = {int(word) for word in lines[-1].split()}
        seen |= {pid: facts[1] for pid in descendants(rank) if pid != os.getpid() and (facts := born(pid))}
        left.look(time.monotonic())
    for _ in range(10):
        remains = [pid for pid, start in seen.items() if (now := born(pid)) and now[1] == start] + _marked(mark)
        if not remains:
            break
        for pid in set(remains):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


class Left:
    """Ends a rank that the others have left."""

    def __init__(self, rank: int):
        self.rank = rank
        self.sockets: set[int] = set()
        """Inodes of its connections."""
        self._since: float | None = None
        self._looked = float("-inf")

    def look(self, now: float) -> None:
        """Wake the rank if it is stopped and somebody has hung up on it; kill it when it has been deaf for too long."""
        stopped = self._stopped()
        if not self.sockets or (not stopped and now - self._looked < SELDOM):
            return
        self._looked = now
        if not self._alone():
            self._since = None
            return
        self._since = now if self._since is None else self._since
        waited = now - self._since
        with suppress(OSError):
            if waited > (STUBBORN if stopped else DEAF):
                os.kill(self.rank, signal.SIGKILL)
            elif stopped:
                os.kill(self.rank, signal.SIGCONT)
            elif waited > DEAF / 2:
                os.kill(self.rank, signal.SIGQUIT)  # its stacks, into its log

    def _stopped(self) -> bool:
        with suppress(OSError, IndexError):
            return Path(f"/proc/{self.rank}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def _alone(self) -> bool:
        """Whether the other end of a connection is closed, or the connection is broken."""
        states: dict[int, str] = {}
        for name in ("tcp", "tcp6"):
            with suppress(OSError, IndexError):
                rows = [line.split() for line in Path(f"/proc/{self.rank}/net/{name}").read_text().splitlines()[1:]]
                states |= {int(row[9]): row[3] for row in rows}
        return any(states.get(inode, CLOSE_WAIT) == CLOSE_WAIT for inode in self.sockets) if states else False


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
