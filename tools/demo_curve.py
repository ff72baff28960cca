"""Draw the loss of a run in the terminal.

python tools/demo_curve.py RUN/metrics.jsonl
"""

import argparse
import json
from pathlib import Path

from hpclm import cli, files

WIDTH, HEIGHT = 72, 14


def main(argv: list[str]) -> int:
    """Print the training loss as a curve, and the validation losses as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path)
    args = parser.parse_args(argv)
    lines = files.readable(args.metrics, "metrics").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    train = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    valid = [(row["step"], row["validation_loss"]) for row in rows if row.get("validation_loss") is not None]
    if train:
        print(f"\nloss over {train[-1][0]} steps: · training, o validation\n\n{drawn(train, valid)}\n")
    for step, loss in valid:
        print(f"  step {step:>5}   validation loss {loss:.3f}")
    return 0


def drawn(train: list[tuple[int, float]], valid: list[tuple[int, float]]) -> str:
    """The two series in a grid of characters, lowest loss at the bottom."""
    last = train[-1][0]
    values = [loss for _, loss in (*train, *valid)]
    low, high = min(values), max(values)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for series, mark in ((train, "·"), (valid, "o")):
        for step, loss in series:
            column = min(WIDTH - 1, (step - 1) * WIDTH // last)
            row = round((high - loss) / (high - low or 1) * (HEIGHT - 1))
            grid[row][column] = mark
    labels = [f"{high - (high - low) * row / (HEIGHT - 1):6.2f} |" for row in range(HEIGHT)]
    return "\n".join(label + "".join(line).rstrip() for label, line in zip(labels, grid, strict=True))


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
