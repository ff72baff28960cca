"""The loss of a run while it trains, as a picture for notebooks."""

import io
import math
import warnings
from typing import Any

from hpclm.reporting.history import History

COLOUR, HELD_OUT = "#0072b2", "#d55e00"
HEIGHT, POINTS = 3.0, 2000


def loss_png(history: History, title: str) -> bytes:
    """Training and validation loss over the steps, as a PNG."""
    from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a display

    figure = Figure(figsize=(2.2 * HEIGHT, HEIGHT), layout="constrained")
    axes: Any = figure.add_subplot()
    every = math.ceil(len(history.steps) / POINTS) or 1
    axes.plot(*(history.steps[name][::every] for name in ("step", "loss")), color=COLOUR, lw=1.2, label="training")
    measured = [
        (row["step"], row["validation_loss"]) for row in history.evaluations if row["validation_loss"] is not None
    ]
    if measured:
        axes.plot(*zip(*measured, strict=True), "o-", color=HELD_OUT, ms=4, lw=1.2, label="validation")
        axes.legend()
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(title, fontsize=10, loc="left")
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # in a title whose script the font lacks
        figure.savefig(written, format="png", dpi=110)
    return written.getvalue()
