"""The process ``hpclm.sinks.worker SINK RUN``: sends the rows of metrics.jsonl to a sink until its standard input ends.

Rank 0 starts it, and writes the attempt's exit code into its standard input; if rank 0 is killed, that just ends. It writes to the run's
log itself; output of libraries is discarded.
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
# Seconds until SIGALRM ends this process, after the attempt has ended or rank 0 was killed.
LAST = 60
KILLED = 3


class Ending(threading.Event):
    """Set once the attempt ends; ``code`` is its exit code."""

    code = 1

    def listen(self) -> None:
        """Wait for the end of standard input."""
        text = sys.stdin.read()
        signal.alarm(LAST if text else KILLED)
        self.code = int(text or 1)
        self.set()


def main(name: str, out: Path) -> int:
    """Send until the attempt ends, then the rest; returns 1 if the sink lacks some of it."""
    for number in WARNINGS:  # of a terminal or a job; rank 0 decides how the attempt ends
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    ending = Ending()
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
    os._exit(main(sys.argv[1], Path(sys.argv[2])))  # whatever a library's threads still wait for
