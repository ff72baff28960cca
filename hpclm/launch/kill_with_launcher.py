"""A script that runs beside mpirun or srun: ends them and their local ranks if the launcher (hpclm submit) is killed.

Its standard input is a pipe from the launcher, which sends the PID of mpirun, then nothing until it ends.
PR_SET_PDEATHSIG would not do: the kernel sends that signal once for each thread of the launcher, and at a second
SIGTERM mpirun exits at once, without ending its ranks.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

GRACE = 5.0  # seconds for mpirun to end all ranks, those on other hosts too


def main() -> None:
    """Wait for the launcher's end, then send SIGTERM once, and SIGKILL to the rest of the session."""
    number = sys.stdin.readline()
    if not number:
        return
    leader = int(number)
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(leader)
        sys.stdin.read()
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        select.select([handle], [], [], GRACE)
    for _ in range(20):
        if not (left := in_session(leader)):
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def in_session(leader: int) -> list[int]:
    """The processes of the session of ``leader``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(folder.name)) == leader:
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    main()
