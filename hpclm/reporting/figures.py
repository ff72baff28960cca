"""The figures of a report as images, for slides and papers, a histogram, and the loss of a run in a notebook. The only file that imports matplotlib."""

import io
import logging
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpclm import extras
from hpclm.reporting import curves
from hpclm.reporting.curves import Chart, Runs
from hpclm.reporting.experts import LOADS, NO_TOKEN, RANGE, ExpertHistory
from hpclm.reporting.history import KINDS, Attempt, History
from hpclm.reporting.timeline import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)
WIDE = 7.2  # inches of a figure that spans the page
INK = "#808890"  # of text and axes: legible on white and on black
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
CHINESE = (
    *("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "PingFang SC"),
    *("Microsoft YaHei", "SimHei", "Noto Sans CJK JP", "Droid Sans Fallback"),
)
"""Fonts with Chinese characters, which matplotlib's own lacks."""
COLOUR, HELD_OUT = "#0072b2", "#d55e00"
HEIGHT, POINTS = 3.0, 2000


def _style(text: str) -> Any:
    """STYLE, with a font for the Chinese characters in ``text``; a warning if matplotlib knows none."""
    if all(char < "\u2e80" for char in text):
        return STYLE
    import matplotlib
    from matplotlib.font_manager import fontManager

    fonts = [font for font in CHINESE if font in fontManager.get_font_names()][:1]
    if not fonts:
        log.warning(
            "images show Chinese characters as boxes: matplotlib knows no Chinese font; install one, such as Debian's "
            "fonts-noto-cjk, and delete %s",
            matplotlib.get_cachedir(),
        )
    return STYLE | {"font.family": ["sans-serif", *fonts]}


def figures(runs: Runs) -> dict[str, "Figure"]:
    """Every figure for which there are numbers, by name."""
    with extras.needed_for("images"):
        import matplotlib
    runs = curves.ordered(runs)
    with matplotlib.rc_context(_style("".join(runs) if len(runs) > 1 else "")):
        drawn = {chart.place: _chart(chart, list(runs) if len(runs) > 1 else None) for chart in curves.charts(runs)}
        for name, history in runs.items():
            if history.experts:
                drawn["expert load" if len(runs) == 1 else f"expert load {name}"] = _heat_maps(history.experts)
            if history.attempts:
                drawn["attempts" if len(runs) == 1 else f"attempts {name}"] = _timeline(history)
        return drawn


def _figure(height: float = 2.7, width: float = 5.2) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a display

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _chart(chart: Chart, names: Sequence[str] | None) -> "Figure":
    """A chart; ``names``: all runs, in the order of their colours, if they are not those of its curves."""
    figure, axes = _figure(3.8, WIDE) if curves.is_loss(chart.key) else _figure()
    colours = dict(zip(names or [curve.name for curve in chart.curves], curves.COLOURS, strict=False))
    for curve in chart.layers:
        colour = colours.get(curve.name, INK)
        label = curve.name if curve.name in colours and len(chart.curves) > 1 else None
        if chart.group > 1 and curve.name in colours:
            axes.fill_between(
                *(values[: curve.kept] for values in (curve.steps, curve.low, curve.high)),
                color=colour,
                alpha=0.15,
                lw=0,
            )
        axes.plot(*curve.line, "o-" if curve.dots else "-", ms=3, color=colour, lw=1.4, label=label)
        if curve.left:
            axes.plot(*curve.left, "x", color=colour, ms=9, mew=2.5, clip_on=False)
    axes.set(xlabel="step", ylabel=chart.unit, yscale="log" if chart.log else "linear")
    axes.set_title(chart.title, parse_math=False)
    axes.set_xlim(chart.first, chart.last + (chart.first == chart.last))
    axes.set_ylim(chart.bottom, chart.top)
    if chart.key == "tokens_per_second":
        axes.yaxis.set_major_formatter("{x:,.0f}")
    if len(chart.curves) > 1:
        axes.legend(fontsize=8.5, reverse=True)
    return figure


def _heat_maps(load: ExpertHistory) -> "Figure":
    """The load of every expert over the steps, a panel for each layer."""
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.figure import Figure

    lines = math.ceil(len(load.blocks) / 2)
    figure = Figure(figsize=(WIDE, 0.9 + 1.6 * lines), layout="constrained")
    panels = figure.subplots(lines, 2, sharex=True, squeeze=False).ravel()
    colours = ListedColormap(LOADS, under=NO_TOKEN)
    for layer, (block, axes) in enumerate(zip(load.blocks, panels, strict=False)):
        ends = load.edges[0], load.edges[-1], -0.5, load.load.shape[2] - 0.5
        percent, scale = load.percent(layer), LogNorm(100 / RANGE, 100 * RANGE)
        on_scale = percent.clip(math.ceil(100 / RANGE)) * (percent > 0) + (percent == 0)  # 0 has no logarithm
        image = axes.imshow(on_scale, colours, scale, extent=ends, aspect="auto", origin="lower", interpolation="none")
        axes.set_title(block, fontsize=9)
        axes.grid(visible=False)
    for axes in panels[len(load.blocks) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=panels, extend="min", label="load of an expert, % of the mean")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("expert", fontsize=9)
    return figure


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
    with matplotlib.rc_context(_style(title) | {"figure.facecolor": "white"}):
        figure, axes = _figure(3.8, WIDE)
        axes.bar(range(len(counts)), counts, color=curves.COLOURS[0])
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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from")  # of which _style has warned
        figure.savefig(content, format="png", dpi=200, facecolor="white")
    return content.getvalue()


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
