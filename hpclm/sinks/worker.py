"""The process ``hpclm.sinks.worker SINK RUN``: sends the rows of metrics.jsonl to a sink until its standard input ends.

Rank 0 starts it, and writes how the attempt ends into its standard input; if rank 0 is killed, that just ends. What it prints
on standard output is for the run's log, a line for each failure that is new. Libraries' own messages are in logs/sink-SINK.log.
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
from hpclm.sinks import messages_of, position
from hpclm.sinks.feed import Feed

POLL = 0.5  # seconds between two looks at metrics.jsonl
LAST = 3.0  # seconds for the rest when rank 0 is gone
LARGEST = 1 << 24  # bytes of logs/sink-SINK.log, give or take what is printed within ``OFTEN``
KEPT = 1 << 22  # the newest bytes, which are kept once it is larger
OFTEN = 0.1  # seconds between two looks at its size


class Ending:
    """How the attempt ends, once rank 0 has said so or is gone; from then on this process has only some seconds left."""

    def __init__(self, stream: IO[bytes]):
        self.over, self.code = threading.Event(), 1
        threading.Thread(target=self._listen, args=(stream,), daemon=True).start()

    def _listen(self, stream: IO[bytes]) -> None:
        seconds = LAST
        with suppress(ValueError, TypeError, KeyError):
            told = json.loads(stream.readline())
            self.code, seconds = int(told["code"]), float(told["seconds"])
        late = threading.Timer(seconds, os._exit, args=(1,))
        late.daemon = True
        late.start()
        self.over.set()


def shorten(messages: int, path: Path) -> None:
    """Keep only the newest part of the file ``path``, which is open for appending as ``messages``; does not return.

    The file itself is cut, because processes that a library has started append to it too.
    """
    while True:
        time.sleep(OFTEN)
        with suppress(OSError):
            if os.fstat(messages).st_size > LARGEST:
                with files.reader(path) as file:
                    file.seek(-KEPT, os.SEEK_END)
                    newest = file.read(KEPT).partition(b"\n")[2]
                os.ftruncate(messages, 0)
                os.write(messages, b"(older messages were removed)\n" + newest)


def main(name: str, out: Path, say: IO[bytes]) -> bool:
    """Send until the attempt ends, then the rest; whether the sink has all of it."""
    for number in WARNINGS:  # of a terminal or a job; how the attempt ends is rank 0's decision
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    threading.Thread(target=shorten, args=(2, messages_of(out, name)), daemon=True).start()
    ending, redact = Ending(sys.stdin.buffer), secrets.Redactor()

    def tell(text: str) -> None:
        with suppress(OSError):  # rank 0 is gone
            say.write(redact(text)[:2000].encode(errors="backslashreplace") + b"\n")

    with files.locked(position.lock(out, name)):  # the process of an earlier attempt may still be sending
        feed = Feed(name, out, tell, "training continues, and it is tried again")
        while not ending.over.wait(POLL):
            feed.send()
        feed.retry()
        complete = feed.send()
        feed.close(ending.code)
    return complete


if __name__ == "__main__":
    to_the_log = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # libraries print
    os._exit(
        0 if main(sys.argv[1], Path(sys.argv[2]), to_the_log) else 1
    )  # whatever a library's threads still wait for
