"""A script that runs beside a launch in the foreground: if the launcher (hpclm submit) is killed, the launch ends with it.

The processes of this machine have a variable in their environment, ``MARK=VALUE`` of the command line, or descend from
one that has it. So nothing depends on how far they have started. Those of other machines end with mpirun or srun.

Its standard input is a pipe from the launcher, which sends the PID of mpirun or srun, if there is one, then nothing
until it ends; its standard output is the launch's log. PR_SET_PDEATHSIG would not do: the kernel sends that signal once
for each thread of the launcher, and at a second SIGTERM mpirun exits at once, without ending its ranks.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

GRACE = 2.5  # seconds for ranks to log why they end, and for mpirun to end those on other hosts
QUIET = 0.5  # seconds without any process after which there are none: one that is being started has no variable yet
LONGEST = 30.0  # seconds, even if a process cannot be killed
Processes = set[tuple[int, str]]
"""PIDs, with when they started."""


def main(mark: bytes) -> None:
    """Wait for the launcher's end; then send mpirun SIGTERM once, and SIGKILL to all that are left after a moment."""
    leader = None
    if number := sys.stdin.readline():
        with suppress(ProcessLookupError):
            leader = os.pidfd_open(int(number))
        sys.stdin.read()
    began = time.monotonic()
    if leader is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(leader, signal.SIGTERM)
    known: Processes = set()
    while running(mark, known) and time.monotonic() < began + GRACE:
        time.sleep(0.1)
    seen = time.monotonic()
    while time.monotonic() < min(seen + QUIET, began + LONGEST):
        for pid in running(mark, known):
            seen = time.monotonic()
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} E the launcher was killed; what it had started has ended too\n")


def running(mark: bytes, known: Processes) -> list[int]:
    """The processes of the launch. ``known`` are those seen so far, whose children may have lost their parents since."""
    parents, marked = dict[tuple[int, str], int](), set(known)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent, *rest = (folder / "stat").read_text().rpartition(")")[2].split()
            if state in "ZX":
                continue
            process = int(folder.name), rest[17]
            parents[process] = int(parent)
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(process)
    while True:
        alive = {pid for pid, start in marked if (pid, start) in parents}
        more = {process for process, parent in parents.items() if parent in alive} - marked
        if not more:
            break
        marked |= more
    known |= marked
    return [pid for pid, start in known if (pid, start) in parents and pid != os.getpid()]


if __name__ == "__main__":
    main(sys.argv[1].encode())
