"""Logging set-up for every verb: to the terminal, and to a run's own file."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpclm.errors import HpclmError

FORMAT = "%(asctime)s %(levelname).1s %(message)s"
EARLY = 1000  # lines at most that wait for a run's own file
LIVE = {"live": True}  # as a record's ``extra``: a terminal's live line says the same


class Console(logging.Handler):
    """Standard error, beside a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, unless a live line on this terminal already says it."""
        from tqdm import tqdm

        with suppress(OSError):  # nobody listens any more, which is no reason for a run to end; its own file has it
            if not (getattr(record, "live", False) and sys.stderr.isatty()):
                tqdm.write(self.format(record), file=sys.stderr)


class Early(logging.Handler):
    """What is logged before a run has a file to log to."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record."""
        if len(self.records) < EARLY:
            self.records.append(record)


class Formatter(logging.Formatter):
    """A line of the log, or several with a traceback, as ``redact`` gives them back."""

    def __init__(self, redact: Callable[[str], str], dates: str | None = None, before: str = ""):
        super().__init__(before + FORMAT, dates)
        self.redact = redact

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return self.redact(super().format(record))


def setup(rank: int = 0, level: int = logging.INFO, redact: Callable[[str], str] = str, marked: bool = False) -> None:
    """Send the log to standard error; of ranks other than 0 only warnings, until they have a file of their own.

    ``redact`` takes out what must not be told, secrets. ``marked``: somebody else says of each line whose it is.
    """
    console = Console()
    console.setFormatter(Formatter(redact, "%H:%M:%S", f"[rank {rank}] " if rank and not marked else ""))
    if rank:
        console.setLevel(logging.WARNING)
    logging.basicConfig(level=level, handlers=[console, Early()], force=True)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a log that cannot be written (a full disk) must not bury the error that matters


def instead_to(path: Path, redact: Callable[[str], str] = str) -> None:
    """From here on, append all that this process says to ``path`` instead: the log, and whatever libraries print."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    own = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(own, 1)
    os.dup2(own, 2)
    os.close(own)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter(redact))
    root = logging.getLogger()
    for old in [each for each in root.handlers if isinstance(each, Console)]:
        root.removeHandler(old)
    _take_over(handler)


def _take_over(handler: logging.Handler) -> None:
    """Let ``handler`` have what was logged before it was there, and what comes."""
    root = logging.getLogger()
    for early in [each for each in root.handlers if isinstance(each, Early)]:
        root.removeHandler(early)
        for record in early.records:
            handler.handle(record)
    root.addHandler(handler)


@contextmanager
def also_to(path: Path, redact: Callable[[str], str] = str) -> Iterator[None]:
    """Append the log to ``path`` too while the block runs, without what ``redact`` takes out."""
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(Formatter(redact))
    _take_over(handler)
    try:
        yield
    except Exception as error:  # what ends a run is the line its log is read for; the terminal gets it elsewhere
        trace = None if isinstance(error, HpclmError) else sys.exc_info()
        handler.handle(logging.LogRecord("hpclm", logging.ERROR, __file__, 0, "%s", (error,), trace))
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
