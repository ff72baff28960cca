"""Catch the signals that announce the end, so that the loop finishes its step before it saves and exits.

Which signal comes depends on the cluster: TERM on plain preemption, USR1 or USR2 if the job asked for it. Ctrl-C counts too;
a second Ctrl-C ends the process at once. HUP means that the terminal was closed, unless nohup ignores it.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """While the block runs, ``handler`` receives these signals. A hang-up that nohup has silenced stays so."""
    before = _install(handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)


def _install(handler: Callable[[int, FrameType | None], object]) -> dict[int, Any]:
    """Have ``handler`` receive the signals; the handlers before it."""
    heard = [number for number in WARNINGS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


class Preemption:
    """Remembers a warning signal until the loop is ready for it."""

    def __init__(self) -> None:
        self._when: dict[str, float] = {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Preemption":
        self._before = _install(self._note)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for number, handler in self._before.items():
            if kind is None and number != signal.SIGINT:  # a late signal must not change the exit code
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
            with suppress(OSError):  # the terminal may be closed
                os.write(2, f"{name}: finishing this step if there is time, then saving and exiting\n".encode())

    def seconds(self, name: str) -> float:
        """Seconds since the first signal of that name, more than 0; 0 if none has arrived."""
        return max(time.monotonic() - self._when[name], 1e-9) if name in self._when else 0.0
