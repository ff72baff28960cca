"""Hear the warning signal, and let the loop finish its step before it saves and leaves.

Which signal warns depends on the cluster: TERM on plain preemption, USR1 or USR2 where the job asked for it. Ctrl-C is
one more; a second Ctrl-C ends the process at once. HUP says that the terminal is gone, unless nohup has it ignored.
"""

import os
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Any

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


class Preemption:
    """Remembers a warning signal until the loop is ready for it."""

    def __init__(self) -> None:
        self._when: dict[str, float] = {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Preemption":
        heard = [n for n in WARNINGS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in heard}
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
        name = signal.Signals(number).name
        if name == "SIGINT" and name in self._when:
            raise KeyboardInterrupt
        first = not self._when
        self._when.setdefault(name, time.monotonic())
        if first:  # os.write and no log line: signals come in bursts, and a log is not reentrant
            with suppress(OSError):  # nobody may be listening any more
                os.write(2, f"{name}: finishing this step if there is time, then saving and leaving\n".encode())

    def seconds(self, name: str) -> float:
        """Seconds since the first signal of that name, more than 0; 0 where none has come."""
        return max(time.monotonic() - self._when[name], 1e-9) if name in self._when else 0.0
