"""The figures of a report, as SVG that takes the page's colours, and as PNG. The only file that imports matplotlib."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpclm import extras
from hpclm.reporting.history import KINDS, Attempt, History

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 7.2  # inches of a figure that spans the page
POINTS = 1200  # of a curve; of more rows the mean of each few is drawn, and their range behind it
INK = "#13579b"  # stands for the page's own text colour in the SVG
RUNS = ("#2f7ed8", "#e8762d", "#2a9d5c", "#b455c8", "#c0392b", "#8d6e3f", "#11999e", "#7f8c8d")
COLOURS = {"queued": "#b8bec6", "starting": "#8e6bbf", "training": "#2a9d5c", "saving": "#2f7ed8", "lost": "#d64545"}
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
Named = Mapping[str, History]


def figures(runs: Named, ink: str = INK) -> dict[str, "Figure"]:
    """Every figure for which there are numbers, by name; ``ink``: the colour of text and axes."""
    with extras.needed_for("hpclm report"):
        import matplotlib
    with matplotlib.rc_context(style(ink)):
        found = {"loss": _loss(runs)}
        for key, (title, unit, factor) in PANELS.items():
            if any(row.get(key) for history in runs.values() for row in history.steps):
                found[key] = _panel(runs, key, (title, unit, factor))
        for name, history in runs.items():
            if history.attempts:
                found["attempts" if len(runs) == 1 else f"attempts {name}"] = _timeline(history)
        return found


def style(ink: str) -> Any:
    """matplotlib's settings."""
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    return {
        "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's font
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
        **dict.fromkeys(inked, ink),
    }


def _figure(height: float = 2.7, width: float = 5.2) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a display

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _loss(runs: Named) -> "Figure":
    """Training and validation loss."""
    figure, axes = _figure(3.8, WIDE)
    for number, (name, history) in enumerate(runs.items()):
        colour = RUNS[number % len(RUNS)]
        label = f"{name}, " if len(runs) > 1 else ""
        _curve(axes, [(row["step"], row.get("loss")) for row in history.steps], colour, f"{label}training")
        parts = dict.fromkeys(row.get("part", "valid") for row in history.evaluations)
        for place, (mark, part) in enumerate(zip(MARKS, parts, strict=False)):
            rows = [row for row in history.evaluations if row.get("part", "valid") == part]
            points = [(row["step"], row["validation_loss"]) for row in rows if row["validation_loss"] is not None]
            if points:
                shade = RUNS[(place + 1) % len(RUNS)] if len(runs) == 1 else colour
                said = f"{label}validation{part.removeprefix('valid').replace('/', ' ')}"
                ways = dict(color=shade, markersize=5, lw=1.2, ls="--", markeredgecolor="white", zorder=4)
                axes.plot(*zip(*points, strict=True), marker=mark, label=said, **ways)
        if len(runs) == 1:
            _restarts(axes, history)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8.5)
    return figure


def _restarts(axes: Any, history: History) -> None:
    """A thin line where each attempt after the first resumed."""
    for number, attempt in enumerate(history.attempts[1:]):
        axes.axvline(attempt.first, color="grey", lw=0.8, ls=":", label="resumed" if not number else None)


def _panel(runs: Named, key: str, words: tuple[str, str, float]) -> "Figure":
    """One quantity over the steps."""
    figure, axes = _figure()
    title, unit, factor = words
    for number, (name, history) in enumerate(runs.items()):
        points = [(row["step"], None if row.get(key) is None else row[key] * factor) for row in history.steps]
        _curve(axes, points, RUNS[number % len(RUNS)], name if len(runs) > 1 else None)
    axes.set(xlabel="step", ylabel=unit, title=title)
    if key == "tokens_per_second":
        axes.yaxis.set_major_formatter("{x:,.0f}")
    if key == "grad_norm" and _spread(runs, key) > 100:
        axes.set_yscale("log")
    elif key != "lr":
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    if len(runs) > 1:
        axes.legend(fontsize=8.5)
    return figure


def _spread(runs: Named, key: str) -> float:
    values = [row[key] for history in runs.values() for row in history.steps if row.get(key)]
    return max(values) / min(values) if values else 1.0


def _curve(axes: Any, points: Sequence[tuple[int, float | None]], colour: str, label: str | None) -> None:
    """A curve; values that were not finite are gaps."""
    width = max(1, math.ceil(len(points) / POINTS))
    x, mean, low, high = [], [], [], []
    for begin in range(0, len(points), width):
        part = points[begin : begin + width]
        values = [value for _, value in part if value is not None]
        x.append(part[len(part) // 2][0])
        mean.append(sum(values) / len(values) if values else math.nan)
        low.append(min(values, default=math.nan))
        high.append(max(values, default=math.nan))
    if width > 1:
        axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    axes.plot(x, mean, color=colour, lw=1.4, label=label)


def _timeline(history: History) -> "Figure":
    """A bar for each attempt, from when it was queued to its last sign of life."""
    from matplotlib.patches import Patch

    attempts = history.attempts
    figure, axes = _figure(1.1 + 0.55 * min(len(attempts), 40), WIDE)
    origin = attempts[0].begin
    unit, seconds = next((u, s) for u, s in (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
                         if history.wall > 3 * s or s == 1)  # fmt: skip
    for attempt in attempts:
        _words(axes, attempt, origin, history.wall, seconds)
        for phase in attempt.phases:
            hatch = "///" if phase.kind == "lost" else None
            axes.barh(attempt.number, phase.seconds / seconds, left=(phase.begin - origin) / seconds, height=0.5,
                      color=COLOURS[phase.kind], hatch=hatch, edgecolor="white" if hatch else COLOURS[phase.kind],
                      lw=0.3)  # fmt: skip
    used = [kind for kind in KINDS if history.seconds(kind) > history.wall / 1000]
    axes.legend(handles=[Patch(color=COLOURS[kind], label=kind) for kind in used], ncols=len(used), fontsize=9,
                loc="lower left", bbox_to_anchor=(0, 1))  # fmt: skip
    axes.set(xlabel=f"{unit} since the run was first queued or started", ylabel="attempt")
    axes.set_ylim(len(attempts) + 0.4, 0.3)
    step = max(1, len(attempts) // 20)
    axes.set_yticks(range(1, len(attempts) + 1, step))
    axes.grid(axis="y", visible=False)
    return figure


def _words(axes: Any, attempt: Attempt, origin: float, wall: float, unit: float) -> None:
    """Above an attempt's bar: its steps, and what ended it."""
    early = attempt.begin - origin < wall / 2
    where = (attempt.begin if early else attempt.end) - origin
    ended = f": {attempt.ended}" if attempt.ended else ""
    words = f"steps {attempt.first} to {attempt.last}{ended if len(ended) < 70 else ended[:67] + '…'}"
    axes.text(where / unit, attempt.number - 0.29, words, fontsize=8, ha="left" if early else "right", va="bottom",
              parse_math=False)  # fmt: skip


def histogram(names: Sequence[str], counts: Sequence[int], title: str) -> "Figure":
    """Document lengths: a bar for each bin, with its name below it."""
    with extras.needed_for("--histogram"):
        import matplotlib
    with matplotlib.rc_context(style("#333333") | {"figure.facecolor": "white"}):
        figure, axes = _figure(3.8, WIDE)
        axes.bar(range(len(counts)), counts, color=RUNS[0])
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
        axes.set(xlabel="tokens in a document", ylabel="documents", title=title)
    return figure


def svg(figure: "Figure", name: str) -> str:
    """A figure drawn with INK as an <svg> element, whose ids begin with ``name`` and whose text has the page's colour."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(style(INK)):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    found = text.getvalue()
    found = found[found.index("<svg") :].replace(INK, "currentColor")
    prefix = re.sub(r"\W", "-", name)
    found = re.sub(r'\bid="', f'id="{prefix}-', found)
    found = re.sub(r'(xlink:href="#|url\(#)', rf"\1{prefix}-", found)
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.S)
    return re.sub(
        r'<svg ([^>]*?)(?:width|height)="[^"]*pt"([^>]*?)(?:width|height)="[^"]*pt"', r"<svg \1\2", found, count=1
    )


def png(figure: "Figure") -> bytes:
    """The figure as PNG, on white, for slides and papers."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=200, facecolor="white")
    return content.getvalue()
