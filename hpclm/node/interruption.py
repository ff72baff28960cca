"""How INT, TERM and HUP end a command: by an exception, so that it removes its unfinished files, or at once."""

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hpclm.errors import shell_code


def leave(number: int, _: FrameType | None) -> None:
    """Handle a signal by an exception, as Python itself handles INT."""
    raise SystemExit(shell_code(-number))


@contextmanager
def raising() -> Iterator[None]:
    """In the block TERM and HUP raise SystemExit with 128 + signal, so that it can clean up; INT raises KeyboardInterrupt anyway.

    Signals that have handlers already, and other threads than the main one, are left as they are.
    """
    with _handled((signal.SIGTERM, signal.SIGHUP), (signal.SIG_DFL, signal.default_int_handler), leave):
        yield


@contextmanager
def at_once() -> Iterator[None]:
    """In the block INT, TERM and HUP end the process at once, unless somebody else handles them.

    It is for long calls of a library, which delay Python's handlers until they return, while no file is unfinished.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with _handled(numbers, (leave, signal.default_int_handler), signal.SIG_DFL):
        yield


@contextmanager
def _handled(
    numbers: Collection[signal.Signals], present: Collection[Any], handler: Callable[..., None] | signal.Handlers
) -> Iterator[None]:
    """In the block ``handler`` receives those signals of ``numbers`` that one of the handlers ``present`` had."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) in present:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, earlier)
