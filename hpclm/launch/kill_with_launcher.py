"""A script that runs beside a launch in the foreground: if the launcher (hpclm submit) is killed, the launch ends with it.

All its processes on this machine have the variable ``MARK=VALUE`` of the command line in their environment, however far they
have started. Those of other machines end with mpirun or srun. Its standard input is a pipe from the launcher that nobody
writes to, its standard output the launch's log. PR_SET_PDEATHSIG would not do: torchrun starts the ranks, and mpirun would
exit without ending its own.
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
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun")


def main(mark: bytes) -> None:
    """Wait for the launcher's end; then send mpirun SIGTERM once, and SIGKILL to all that are left after a moment."""
    sys.stdin.read()
    began = time.monotonic()
    for pid in running(mark):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() in LAUNCHERS:
                os.kill(pid, signal.SIGTERM)
    while running(mark) and time.monotonic() < began + GRACE:
        time.sleep(0.1)
    seen = time.monotonic()
    while time.monotonic() < min(seen + QUIET, began + LONGEST):
        for pid in running(mark):
            seen = time.monotonic()
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} E the launcher was killed; what it had started has ended too\n")


def running(mark: bytes) -> list[int]:
    """The processes of the launch."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
            if marked and state not in "ZX" and folder.name != str(os.getpid()):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    main(sys.argv[1].encode())
