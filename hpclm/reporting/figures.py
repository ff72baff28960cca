"""The figures of a report, readable on light and dark pages. The only file that imports matplotlib."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpclm import extras
from hpclm.reporting.history import KINDS, Attempt, History

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 7.2  # inches of a figure that spans the page
POINTS = 1200  # of a curve; of more rows the mean of each few is drawn
INK = "#808890"  # of text and axes: legible on white and on black
RUNS = ("#2f7ed8", "#e8762d", "#2a9d5c", "#b455c8", "#c0392b", "#8d6e3f", "#11999e", "#7f8c8d")
COLOURS = {"queued": "#b8bec6", "starting": "#8e6bbf", "training": "#2a9d5c", "lost": "#d64545"}
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
PANELS: dict[str, tuple[str, str, float]] = {
    # of metrics.jsonl: title, unit, and what a value is multiplied with
    "lr": ("Learning rate", "", 1.0),
    "grad_norm": ("Gradient norm", "", 1.0),
    "tokens_per_second": ("Speed", "tokens/s", 1.0),
    "mfu": ("Model FLOPs utilisation (MFU)", "%", 100.0),
    "memory": ("Peak memory of rank 0", "GiB", 1 / (1 << 30)),
    "data_fraction": ("Time waiting for data", "% of the step", 100.0),
}
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text, in the reader's font
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}
Named = Mapping[str, History]


def figures(runs: Named) -> dict[str, "Figure"]:
    """Every figure for which there are numbers, by name."""
    with extras.needed_for("hpclm report"):
        import matplotlib
    with matplotlib.rc_context(STYLE):
        drawn = {"loss": _loss(runs)}
        for key in PANELS:
            if any(row.get(key) for history in runs.values() for row in history.steps):
                drawn[key] = _panel(runs, key)
        for name, history in runs.items():
            if history.attempts:
                drawn["attempts" if len(runs) == 1 else f"attempts {name}"] = _timeline(history)
        return drawn


def _figure(height: float = 2.7, width: float = 5.2) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a display

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _loss(runs: Named) -> "Figure":
    """Training and validation loss, and where attempts resumed."""
    figure, axes = _figure(3.8, WIDE)
    for number, (name, history) in enumerate(runs.items()):
        colour, label = RUNS[number % len(RUNS)], f"{name}, " if len(runs) > 1 else ""
        _curve(axes, [(row["step"], row.get("loss")) for row in history.steps], colour, f"{label}training")
        for place, part in enumerate(dict.fromkeys(row.get("part", "valid") for row in history.evaluations)):
            rows = [row for row in history.evaluations if row.get("part", "valid") == part]
            points = [(row["step"], row["validation_loss"]) for row in rows if row["validation_loss"] is not None]
            shade = RUNS[(place + 1) % len(RUNS)] if len(runs) == 1 else colour
            title = f"{label}validation{part.removeprefix('valid').replace('/', ' ')}"
            if points:
                axes.plot(
                    *zip(*points, strict=True), f"{MARKS[place % len(MARKS)]}--", color=shade, lw=1.2, label=title
                )
        for place, attempt in enumerate(history.attempts[1:] if len(runs) == 1 else ()):
            axes.axvline(attempt.first, color="grey", lw=0.8, ls=":", label=None if place else "resumed")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8.5)
    return figure


def _panel(runs: Named, key: str) -> "Figure":
    """One quantity over the steps."""
    figure, axes = _figure()
    title, unit, factor = PANELS[key]
    for number, (name, history) in enumerate(runs.items()):
        points = [(row["step"], None if row.get(key) is None else row[key] * factor) for row in history.steps]
        _curve(axes, points, RUNS[number % len(RUNS)], name if len(runs) > 1 else None)
    axes.set(xlabel="step", ylabel=unit, title=title)
    if key == "tokens_per_second":
        axes.yaxis.set_major_formatter("{x:,.0f}")
    if key == "grad_norm":
        axes.set_yscale("log")
    elif key != "lr":
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    if len(runs) > 1:
        axes.legend(fontsize=8.5)
    return figure


def _curve(axes: Any, points: Sequence[tuple[int, float | None]], colour: str, label: str | None) -> None:
    """A curve; values that were not finite are gaps."""
    width = max(1, math.ceil(len(points) / POINTS))
    groups = [points[begin : begin + width] for begin in range(0, len(points), width)]
    values = [[value for _, value in group if value is not None] for group in groups]
    means = [sum(each) / len(each) if each else math.nan for each in values]
    axes.plot([group[len(group) // 2][0] for group in groups], means, color=colour, lw=1.4, label=label)


def _timeline(history: History) -> "Figure":
    """A bar for each attempt, from when it was queued to its last sign of life."""
    from matplotlib.patches import Patch

    attempts = history.attempts
    figure, axes = _figure(1.1 + 0.55 * min(len(attempts), 40), WIDE)
    units = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
    unit, seconds = next(((name, size) for name, size in units if history.wall > 3 * size), units[-1])
    for attempt in attempts:
        for phase in attempt.phases:
            begin = (phase.begin - attempts[0].begin) / seconds
            hatch = "///" if phase.kind == "lost" else None
            axes.barh(
                attempt.number, phase.seconds / seconds, left=begin, height=0.5, color=COLOURS[phase.kind], hatch=hatch
            )
        _label(axes, attempt, attempts[0].begin, history.wall, seconds)
    used = [kind for kind in KINDS if history.seconds(kind) > history.wall / 1000]
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in used]
    axes.legend(handles=handles, ncols=max(1, len(used)), fontsize=9, loc="lower left", bbox_to_anchor=(0, 1))
    axes.set(xlabel=f"{unit} since the run was first queued or started", ylabel="attempt")
    axes.set_ylim(len(attempts) + 0.4, 0.3)
    axes.set_yticks(range(1, len(attempts) + 1, max(1, len(attempts) // 20)))
    axes.grid(axis="y", visible=False)
    return figure


def _label(axes: Any, attempt: Attempt, origin: float, wall: float, unit: float) -> None:
    """Above an attempt's bar: its steps, and what ended it."""
    early = attempt.begin - origin < wall / 2
    at = (attempt.begin if early else attempt.end) - origin
    ended = f": {attempt.ended}" if attempt.ended else ""
    text = f"steps {attempt.first} to {attempt.last}{ended if len(ended) < 70 else ended[:67] + '…'}"
    side = "left" if early else "right"
    axes.text(at / unit, attempt.number - 0.29, text, fontsize=8, ha=side, va="bottom", parse_math=False)


def histogram(names: Sequence[str], counts: Sequence[int], title: str) -> "Figure":
    """Document lengths: a bar for each bin, with its name below it."""
    with extras.needed_for("--histogram"):
        import matplotlib
    with matplotlib.rc_context(STYLE | {"figure.facecolor": "white"}):
        figure, axes = _figure(3.8, WIDE)
        axes.bar(range(len(counts)), counts, color=RUNS[0])
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
        axes.set(xlabel="tokens in a document", ylabel="documents", title=title)
    return figure


def svg(figure: "Figure") -> bytes:
    """The figure as SVG."""
    import matplotlib

    content = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    return content.getvalue()


def png(figure: "Figure") -> bytes:
    """The figure as PNG, on white, for slides and papers."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=200, facecolor="white")
    return content.getvalue()
