"""End a command at INT, TERM or HUP, either by an exception, so that it removes its unfinished files, or at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hpclm.base.errors import shell_code


def leave(number: int, _: FrameType | None) -> None:
    """Raise SystemExit with 128 + signal, as a handler of signals."""
    raise SystemExit(shell_code(-number))


REPLACED = (signal.SIG_DFL, signal.default_int_handler, leave)
"""The handlers that the functions here replace. Any other handler belongs to the caller, and stays."""


@contextmanager
def raising() -> Iterator[None]:
    """In the block, TERM and HUP raise SystemExit with 128 + signal, so that it can clean up. INT raises KeyboardInterrupt."""
    with _handled(leave, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def at_once() -> Iterator[None]:
    """In the block, INT, TERM and HUP end the process at once. No file may be unfinished then.

    It is for long calls into a library, which delay Python's handlers until they return.
    """
    with _handled(signal.SIG_DFL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _handled(handler: Any, *numbers: int) -> Iterator[None]:
    """In the block, ``handler`` receives these signals unless the caller handles them; only in the main thread."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) in REPLACED:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
