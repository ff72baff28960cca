"""The loss curve of a run, in characters."""

from collections.abc import Sequence

from hpclm.reporting.history import History

WIDTH, HEIGHT = 72, 14
Points = Sequence[tuple[int, float]]


def text(history: History) -> str:
    """The training loss as a curve, and the validation losses as a table."""
    train = [(row["step"], row["loss"]) for row in history.steps if row.get("loss") is not None]
    valid = [
        (row["step"], row["validation_loss"]) for row in history.evaluations if row.get("validation_loss") is not None
    ]
    lines = [f"  step {step:>5}   validation loss {loss:.3f}" for step, loss in valid]
    if train:
        lines.insert(0, f"loss over {train[-1][0]} steps: · training, o validation\n\n{drawn(train, valid)}\n")
    return "\n".join(lines)


def drawn(train: Points, valid: Points) -> str:
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
