"""The process ``hpclm.sinks.worker SINK RUN``: sends the rows of metrics.jsonl to a sink until its standard input ends.

Rank 0 starts it, and writes how the attempt ends, ``[CODE, SECONDS]``, into its standard input; if rank 0 is killed, that just ends.
What it prints on standard output is for the run's log. What libraries print is discarded.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from hpclm import files
from hpclm.node import secrets
from hpclm.node.preemption import WARNINGS
from hpclm.sinks import position
from hpclm.sinks.feed import Feed

POLL = 0.5  # seconds between two looks at metrics.jsonl
FIRST, LONGEST = 5.0, 300.0  # seconds until the next try after a failure; doubled each time
LAST = 3.0  # seconds for the rest when rank 0 is gone


class Ending(threading.Event):
    """Set once the attempt ends, which ``code`` says how; the process itself ends soon after."""

    code = 1

    def listen(self) -> None:
        """Wait for rank 0's line, and end the process when the time for the last rows is over."""
        seconds = LAST
        with suppress(ValueError):
            self.code, seconds = json.loads(sys.stdin.readline())
        self.set()
        time.sleep(seconds)
        os._exit(1)


def main(name: str, out: Path, log: IO[bytes]) -> bool:
    """Send until the attempt ends, then the rest; whether the sink has all of it."""
    for number in WARNINGS:  # of a terminal or a job; how the attempt ends is rank 0's decision
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    ending, redact = Ending(), secrets.Redactor()
    threading.Thread(target=ending.listen, daemon=True).start()

    def report(text: str) -> None:
        with suppress(OSError):  # rank 0 is gone
            log.write(redact(text)[:2000].encode(errors="backslashreplace") + b"\n")

    with files.locked(position.lock(out, name)):  # the process of an earlier attempt may still be sending
        feed = Feed(name, out, report, "training continues, and it is tried again")
        pause, retry = POLL, FIRST
        while not ending.wait(pause):
            if feed.send():
                pause, retry = POLL, FIRST
            else:
                pause, retry = retry, min(LONGEST, 2 * retry)
        complete = feed.send()
        feed.close(ending.code)
    return complete


if __name__ == "__main__":
    to_the_log = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # libraries print
    complete = main(sys.argv[1], Path(sys.argv[2]), to_the_log)
    os._exit(0 if complete else 1)  # whatever a library's threads still wait for
