"""Logging to the terminal and to log files."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path

from hpclm.base import files, terminal
from hpclm.base.errors import HpclmError
from hpclm.base.side_path import AppendedFile, SidePath

FORMAT = "%(asctime)s %(levelname).1s %(message)s"
NEVER = logging.CRITICAL + 1
LIVE = {"live": True}  # ``extra`` of records that a progress bar shows too


class Console(logging.Handler):
    """Logs to standard error, above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, unless a progress bar shows it already."""
        from hpclm.base.progress import Bar

        with suppress(Exception):  # a closed terminal must not end the run
            if not (getattr(record, "live", False) and sys.stderr.isatty()):
                Bar.write(self.format(record), file=sys.stderr)


class LogFile(logging.Handler):
    """Logs to a file, which is made again if somebody removes it. Lines that a full disk refuses are written later."""

    def __init__(self, path: Path):
        super().__init__()
        self._file = AppendedFile(path)
        self._writing = SidePath(f"{path} cannot be written")

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record to the file."""
        self._writing.attempt(lambda: self._file.write(self.format(record) + "\n"), now=True)

    def close(self) -> None:
        """Append the lines that are still in memory, and close the file."""
        with suppress(OSError):
            self._file.close()
        super().close()


class Formatter(logging.Formatter):
    """Formats records without secrets and control characters."""

    def __init__(self, redact: Callable[[str], str], dates: str | None = None, before: str = ""):
        super().__init__(before + FORMAT, dates)
        self.redact = redact

    def format(self, record: logging.LogRecord) -> str:
        """The record as text that is safe to print."""
        return terminal.plain(self.redact(super().format(record)))


def setup(rank: int = 0, level: int = logging.INFO, redact: Callable[[str], str] = str, quiet: bool = False) -> None:
    """Log to standard error; on ranks other than 0, or if ``quiet``, only warnings. ``redact`` removes secrets."""
    console = Console()
    console.setFormatter(Formatter(redact, "%H:%M:%S", f"[rank {rank}] " if rank else ""))
    if rank or quiet:
        console.setLevel(logging.WARNING)
    logging.basicConfig(level=level, handlers=[console, MemoryHandler(0, flushLevel=NEVER)], force=True)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # errors of logging, such as a full disk, must not hide other errors


@contextmanager
def restored() -> Iterator[None]:
    """Undo changes to logging, such as those of ``setup``, after the block."""
    root = logging.getLogger()
    show = warnings.showwarning
    raises = logging.raiseExceptions
    handlers = list(root.handlers)
    level = root.level
    for handler in handlers:
        root.removeHandler(handler)  # setup would close it
    try:
        yield
    finally:
        for handler in list(root.handlers):
            root.removeHandler(handler)
        for handler in handlers:
            root.addHandler(handler)
        root.setLevel(level)
        logging.raiseExceptions = raises
        if warnings.showwarning is not show:
            logging.captureWarnings(False)


def instead_to(path: Path, redact: Callable[[str], str] = str) -> None:
    """From now on, append the log and all output of this process to the file ``path`` only."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        handle = files.appending(path, 0o600)
    except OSError as error:
        logging.getLogger(__name__).warning("%s cannot be written: %s; training continues", path, error.strerror)
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter(redact))
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, Console)]:
        root.removeHandler(old)
    _take_over(handler)


def _take_over(handler: logging.Handler) -> None:
    """Add ``handler``, and pass it all earlier records."""
    root = logging.getLogger()
    for early in [existing for existing in root.handlers if isinstance(existing, MemoryHandler)]:
        root.removeHandler(early)
        early.setTarget(handler)
        early.close()  # flushes it
    root.addHandler(handler)


@contextmanager
def also_to(path: Path, redact: Callable[[str], str] = str) -> Iterator[None]:
    """Also append the log to ``path`` during the block. A failure to write is logged on the terminal, and raises nothing."""
    handler = LogFile(path)
    handler.setFormatter(Formatter(redact))
    _take_over(handler)
    try:
        yield
    except Exception as error:  # the caller prints it on the terminal
        if not getattr(error, "reported", False):  # another rank may have logged it
            trace = None if isinstance(error, HpclmError) else sys.exc_info()
            handler.handle(logging.LogRecord("hpclm", logging.ERROR, __file__, 0, "%s", (error,), trace))
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
