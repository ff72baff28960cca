"""The loss of a run in characters: a curve of all of it, and a sparkline."""

from collections.abc import Sequence

from hpclm.reporting.history import History

WIDTH, HEIGHT = 72, 14
BARS = "▁▂▃▄▅▆▇█"
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


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, from the lowest to the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)
