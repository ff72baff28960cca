"""Hear the warning signal, and let the loop finish its step before it saves and leaves.

Which signal warns depends on the cluster: TERM on plain preemption, USR1 or USR2 where the job asked for it. Ctrl-C is
one more; a second Ctrl-C ends the process at once.
"""

import os
import signal
import time
from types import FrameType
from typing import Any

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class Preemption:
    """Remembers a warning signal until the loop is ready for it."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._since: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Preemption":
        self._before = {number: signal.signal(number, self._note) for number in WARNINGS}
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for number, handler in self._before.items():
            if (
                kind is None and number != signal.SIGINT
            ):  # the exit code is decided, and a late signal must not replace it
                signal.signal(number, signal.SIG_IGN)
            else:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        if self.signal is None:  # os.write and no log line: signals come in bursts, and a log is not reentrant
            os.write(2, f"{name}: finishing this step if there is time, then saving and leaving\n".encode())
        self.signal, self._since = name, self._since or time.monotonic()

    def seconds(self) -> float:
        """Seconds since the first warning; 0 before it."""
        return time.monotonic() - self._since if self._since else 0.0
