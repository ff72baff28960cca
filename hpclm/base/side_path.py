"""Best-effort work, such as writing TensorBoard's files. A failure is logged, and never ends the run."""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpclm.base import files

log = logging.getLogger(__name__)
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0  # seconds until the next try after a failure; doubled each time
KEPT = 1 << 26  # bytes kept in memory while a file cannot be written


class SidePath:
    """Does best-effort work. It logs the first of several failures in a row, and waits longer before each new try."""

    def __init__(self, failure: str):
        """``failure``: the beginning of the warning, such as "log.txt cannot be written"."""
        self._failure = failure
        self._failing = False
        self._pause = 0.0
        self._next = 0.0

    def attempt(self, act: Callable[[], object], now: bool = False) -> bool:
        """Call ``act()``, unless a failure was recent and not ``now``; returns whether it was called and succeeded."""
        if not now and time.monotonic() < self._next:
            return False
        try:
            act()
        except Exception as error:  # of a disk, a library, a server
            self._pause = min(MAX_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * self._pause))
            self._next = time.monotonic() + self._pause
            if not self._failing:
                self._failing = True  # before it is logged: the log may be what fails
                log.warning("%s: %s; training continues", self._failure, cause(error, self._failure))
            return False
        self._failing = False
        self._pause = 0.0
        self._next = 0.0
        return True


def cause(error: BaseException, said: str = "") -> str:
    """An error in one line, without the name of its file if ``said`` has it already."""
    if isinstance(error, OSError) and error.strerror:
        named = error.filename and str(error.filename) not in said
        return f"{error.filename}: {error.strerror}" if named else error.strerror
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


class AppendedFile:
    """A file that grows by whole lines. Text that cannot be written is kept in memory, and written with the next line.

    A file that was removed or replaced meanwhile is created again. Links are not followed.
    """

    def __init__(self, path: Path, mode: int = 0o644, may_write: Callable[[], bool] = lambda: True):
        """``may_write``: returns whether this process still owns the file; if not, lines are dropped."""
        self.path = path
        self._mode = mode
        self._may_write = may_write
        self._handle: int | None = None
        self._pending = b""

    def write(self, text: str) -> None:
        """Append ``text``; OSError if it must be kept for later."""
        self._pending = (self._pending + text.encode("utf-8", "backslashreplace"))[-KEPT:]
        self.flush()

    def flush(self) -> None:
        """Append the text in memory; OSError if that fails."""
        if not self._may_write():
            self._pending = b""
            return
        if self._handle is not None and not is_at(self._handle, self.path):
            self._close()
        if self._handle is None:
            self._handle = files.appending(self.path, self._mode)
        while self._pending:
            self._pending = self._pending[os.write(self._handle, self._pending) :]

    def close(self) -> None:
        """Append the text in memory, and close the file; OSError if text is lost."""
        try:
            if self._pending:
                self.flush()
        finally:
            self._close()

    def _close(self) -> None:
        handle = self._handle
        self._handle = None
        if handle is not None:
            with suppress(OSError):
                os.close(handle)


def is_at(handle: int, path: Path) -> bool:
    """Whether ``path`` is still the name of the open file ``handle``."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False
