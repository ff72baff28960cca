"""Logging set-up for every verb: to the terminal, and to a run's own file."""

import logging
import sys
from pathlib import Path

FORMAT = "%(asctime)s %(levelname).1s %(message)s"


def setup(level: int = logging.INFO) -> None:
    """Send the log to standard error."""
    logging.basicConfig(level=level, format=FORMAT, datefmt="%H:%M:%S", stream=sys.stderr, force=True)
    logging.captureWarnings(True)


def also_to(path: Path) -> logging.Handler:
    """Append the log to ``path`` too; the caller removes the handler when the run is over."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger().addHandler(handler)
    return handler
