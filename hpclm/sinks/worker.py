"""The process ``hpclm.sinks.worker SINK RUN`` sends the rows of metrics.jsonl to a sink until its standard input ends.

Rank 0 starts the process, and at the end writes the attempt's exit code into its standard input. If rank 0 is killed, the input ends
without a code. The process writes to the run's log itself; output of libraries is discarded.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from hpclm.base import files, terminal
from hpclm.node import secrets
from hpclm.node.preemption import WARNINGS
from hpclm.sinks.feed import Feed, cause, note, place

POLL = 0.5  # seconds between checks of metrics.jsonl
# The delay before a retry; it doubles with each failure.
FIRST_PAUSE_SECONDS = 5.0
MAX_PAUSE_SECONDS = 300.0
# Seconds until SIGALRM ends this process after the end of the attempt, and after rank 0 was killed.
LAST = 60
KILLED = 3


class AttemptEnd(threading.Event):
    """An event that is set when the attempt ends; ``code`` is its exit code."""

    code = 1

    def listen(self) -> None:
        """Wait for the end of standard input."""
        text = sys.stdin.read()
        signal.alarm(LAST if text else KILLED)
        self.code = int(text or 1)
        self.set()


def main(name: str, out: Path) -> int:
    """Send rows until the attempt ends, then the remaining rows; returns 1 if the sink lacks some of them."""
    for number in WARNINGS:  # signals of a terminal or a job; rank 0 decides how the attempt ends
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    ending = AttemptEnd()
    redact = secrets.Redactor()
    threading.Thread(target=ending.listen, daemon=True).start()

    def warn(text: str) -> None:
        line = terminal.plain(redact(f"sink {name}: {text}")[:2000])
        with suppress(OSError):
            files.append(out / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} W {line}\n")

    with files.locked(place(out, name, "lock")):  # the process of an earlier attempt may still be sending
        feed = Feed(name, out)
        failure = ""
        pause = 0.0
        while True:
            last = ending.wait(pause)
            try:
                feed.send(warn)
                if failure:
                    warn(f"reconnected; synced through row {feed.rows}")
                failure = ""
                pause = POLL
            except (Exception, SystemExit) as error:  # a user's sink may do anything
                if failure != cause(error):
                    warn(f"{cause(error)}; training continues; retrying")
                failure = cause(error)
                pause = min(MAX_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * pause))
            if last:
                feed.close(ending.code)
                note(out, name, redact(failure))
                return bool(failure)


if __name__ == "__main__":
    os._exit(main(sys.argv[1], Path(sys.argv[2])))  # do not wait for a library's threads
