"""Logging set-up for every verb: to the terminal, and to a run's own file."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORMAT = "%(asctime)s %(levelname).1s %(message)s"


def setup(level: int = logging.INFO) -> None:
    """Send the log to standard error."""
    logging.basicConfig(level=level, format=FORMAT, datefmt="%H:%M:%S", stream=sys.stderr, force=True)
    logging.captureWarnings(True)


@contextmanager
def also_to(path: Path) -> Iterator[None]:
    """Append the log to ``path`` too while the block runs."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
