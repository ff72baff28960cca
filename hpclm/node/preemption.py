"""Catch signals that warn of the process's end, so that the training loop finishes its step, saves and exits.

The signal depends on the cluster: TERM at a preemption, USR1 or USR2 if the job asked for it. Ctrl-C counts too; a second Ctrl-C
ends the process at once. HUP says that the terminal was closed, unless nohup ignores it; XCPU says that CPU time runs out.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from hpclm.base.errors import ExitCode

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)


class StartSignals:
    """Handles warnings during the start: the process exits at once with 85, because it has nothing to save.

    Once the ranks have met, a warning waits for ``Preemption``, which makes all ranks exit together.
    """

    def __init__(self) -> None:
        self.alone = True  # the ranks have not met yet
        self.when: dict[str, float] = {}  # signal -> time.monotonic() when it first came

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note a signal, and exit if the ranks have not met."""
        name = signal.Signals(number).name
        self.when.setdefault(name, time.monotonic())
        if self.alone:
            with suppress(OSError):  # the terminal may be closed
                os.write(2, f"{name} during the start: nothing to save, exiting\n".encode())
            os._exit(ExitCode.REQUEUE)


def catch_from_the_start(command: str) -> None:
    """Let ``StartSignals`` handle warnings in hpclm train and submit. Call it before imports that take long.

    In hpclm submit, Python handles Ctrl-C until the command has started a process.
    """
    if command in ("train", "submit"):
        end_at_once([number for number in WARNINGS if command == "train" or number != signal.SIGINT])


def end_at_once(numbers: Sequence[signal.Signals] = WARNINGS) -> None:
    """Let ``StartSignals`` handle warnings until another handler is installed."""
    _install(StartSignals(), numbers)


def ranks_have_met() -> dict[str, float]:
    """From now on, warnings wait for the training loop. Returns signal -> time.monotonic() for earlier warnings."""
    start = signal.getsignal(signal.SIGTERM)
    if not isinstance(start, StartSignals):
        return {}
    start.alone = False
    return start.when


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """In the block, ``handler`` receives the warnings; HUP stays ignored if nohup ignores it."""
    before = _install(handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old or signal.SIG_DFL)


def _install(
    handler: Callable[[int, FrameType | None], object], numbers: Sequence[signal.Signals] = WARNINGS
) -> dict[int, Any]:
    """Install ``handler`` for these signals; returns the earlier handlers. HUP stays ignored if nohup ignores it."""
    caught = [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in caught}


class Preemption:
    """Remembers warning signals until the training loop acts on them."""

    def __init__(self) -> None:
        self._when: dict[str, float] = {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Preemption":
        early = ranks_have_met()
        self._before = _install(self._note)
        self._when = {**early, **self._when}
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for number, handler in self._before.items():
            if kind is None and number != signal.SIGINT:  # a late signal must not change the exit code
                signal.signal(number, signal.SIG_IGN)
            else:
                signal.signal(number, handler or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and name in self._when:
            raise KeyboardInterrupt
        first = not self._when
        self._when.setdefault(name, time.monotonic())
        if first:  # os.write, because signals come in bursts and logging is not reentrant
            with suppress(OSError):  # the terminal may be closed
                os.write(2, f"{name}: finishing this step if there is time, then saving and exiting\n".encode())

    def seconds(self, name: str) -> float:
        """Seconds since the first signal of that name, more than 0; 0 before the first."""
        if name not in self._when:
            return 0.0
        return max(time.monotonic() - self._when[name], 1e-9)
