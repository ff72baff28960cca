"""The course of a run's loss in a few characters, from a few places of its metrics.jsonl."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hpclm import files

BARS = "▁▂▃▄▅▆▇█"
LOSS = re.compile(rb'"loss": ([-+\d.eE]+)[,}]')
PIECE = 1 << 11  # bytes in which there is a whole line


def losses(path: Path, count: int) -> list[float]:
    """About ``count`` losses spread evenly over the file, in order; none where there is no file."""
    try:
        handle = files.opened(path)
    except OSError:
        return []
    try:
        size = os.fstat(handle).st_size
        if size <= count * PIECE:
            found = [float(each) for each in LOSS.findall(os.pread(handle, size, 0))]
            return [found[index * len(found) // count] for index in range(count)] if len(found) > count else found
        pieces = (os.pread(handle, PIECE, (size - PIECE) * number // (count - 1)) for number in range(count))
        return [float(each[-1]) for piece in pieces if (each := LOSS.findall(piece))]
    except (OSError, ValueError):
        return []
    finally:
        os.close(handle)


def drawn(values: Sequence[float]) -> str:
    """A bar for each value, from the lowest to the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)
