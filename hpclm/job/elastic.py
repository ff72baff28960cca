"""torchrun for a job's script: it ends with the exit code of the rank that failed first, and hands signals on to the ranks.

``python -m hpclm.job.elastic`` takes torchrun's arguments. torchrun itself turns every failure into 1, which hides "saved,
start me again" (85), dies of USR2, and kills ranks that are still saving half a minute after a TERM.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hpclm.cluster import threads

HANDED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Start the ranks of this node and wait for them; gives the exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for number in HANDED_ON:
        signal.signal(number, hand_on)
    args = run.parse_args(["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", *argv])
    if str(args.nproc_per_node).isdigit():
        threads.share(int(args.nproc_per_node))
    try:
        run.run(args)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        print(f"rank {rank} (process {first.pid}) ended first, with {first.exitcode}", file=sys.stderr, flush=True)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0


def hand_on(number: int, frame: FrameType | None) -> None:
    """Send the signal to the processes that this one has started, each of which is the first of a session of its own."""
    for pid in children():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                os.kill(pid, number)


def children() -> list[int]:
    """Numbers of the processes that this process, from whichever of its threads, has started."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


if __name__ == "__main__":
    # srun ends all tasks when one has ended with another code than 0: the TERM must not become this one's own code
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
