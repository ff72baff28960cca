"""One rank under a launcher of somebody else's: ``python -m hpclm.job.guard FOLDER COMMAND...``

mpirun ends a rank by its process group, and so misses what the rank has started in a session of its own. The guard ends
all of it, passes each signal on once, and leaves the rank's end in FOLDER as a file of its own: exit codes of mpirun are
its own invention. A rank that asks to be started again (85) is no failure for which mpirun must end the others, so mpirun
is told 0.
"""

import json
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from hpclm import files
from hpclm.cluster import environment
from hpclm.errors import REQUEUE
from hpclm.job import guardian
from hpclm.job.death import End
from hpclm.job.local import SIGNALS
from hpclm.job.supervise import Manner, Process, supervise

ALONE = (
    0.3  # seconds: a launcher that kills a rank kills its guard too, or whoever holds the lifeline, well within them
)


def main(words: list[str]) -> int:
    """Run the rank; its exit code."""
    folder, *command = words
    rank, host, written = environment.rank(), socket.gethostname(), []

    def report(lifeline: int, end: End, itself: bool) -> None:
        row = {"rank": rank, "host": host, "time": time.time(), "pid": end.pid, "code": end.code, "itself": itself}
        if end.code == -signal.SIGKILL and select.select([lifeline], [], [], ALONE)[0]:
            row["itself"] = False
        with suppress(OSError):
            files.write_text(Path(folder) / f"rank-{rank:05d}.json", json.dumps(row))
            written.append(rank)

    def act(lifeline: int) -> int:
        process = Process(f"rank {rank} on {host}", tuple(command), environment.inherited())
        code = supervise([process], lifeline, None, Manner(SIGNALS, spoken=False, ended=partial(report, lifeline)))
        return 0 if code == REQUEUE and written else code

    return guardian.guarded(act, tell=False)


def ends(folder: Path) -> dict[int, End]:
    """How each rank that could say so ended, the first failure first."""
    found = []
    for file in folder.glob("rank-*.json"):
        with suppress(OSError, ValueError, KeyError):
            row = json.loads(file.read_text())
            order = (not row["itself"], row["code"] >= 0, row["time"], row["rank"])  # who was killed did not follow
            found.append((order, End(f"rank {row['rank']} on {row['host']}", row["pid"], row["code"])))
    return {order[-1]: end for order, end in sorted(found, key=lambda one: one[0])}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
