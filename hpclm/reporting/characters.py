"""The loss of a run in characters: a curve of all of it, and a sparkline from a few places of its metrics.jsonl."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hpclm import files
from hpclm.reporting.history import History

WIDTH, HEIGHT = 72, 14
BARS = "▁▂▃▄▅▆▇█"
LOSS = re.compile(rb'"loss": ([-+\d.eE]+)[,}]')
PIECE = 1 << 11  # bytes in which there is a whole line
Points = Sequence[tuple[int, float]]


def curve(history: History) -> str:
    """The training loss as a curve, and the validation losses as a table."""
    train = [(row["step"], row["loss"]) for row in history.steps if row.get("loss") is not None]
    valid = [
        (row["step"], row["validation_loss"]) for row in history.evaluations if row.get("validation_loss") is not None
    ]
    lines = [f"  step {step:>5}   validation loss {loss:.3f}" for step, loss in valid]
    if train:
        lines.insert(0, f"loss over {train[-1][0]} steps: · training, o validation\n\n{_grid(train, valid)}\n")
    return "\n".join(lines)


def _grid(train: Points, valid: Points) -> str:
    """The two series in a grid of characters, lowest loss at the bottom."""
    last = train[-1][0]
    values = [loss for _, loss in (*train, *valid)]
    low, high = min(values), max(values)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for series, mark in ((train, "·"), (valid, "o")):
        for step, loss in series:
            column = max(0, min(WIDTH - 1, (step - 1) * WIDTH // last))
            row = round((high - loss) / (high - low or 1) * (HEIGHT - 1))
            grid[row][column] = mark
    labels = [f"{high - (high - low) * row / (HEIGHT - 1):6.2f} |" for row in range(HEIGHT)]
    return "\n".join(label + "".join(line).rstrip() for label, line in zip(labels, grid, strict=True))


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


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, from the lowest to the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)
