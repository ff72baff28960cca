"""The charts of a report as images, for slides, papers and notebooks. Only this file and image_style.py import matplotlib."""

import math
import textwrap
from typing import TYPE_CHECKING

from hpclm.reporting import timeline
from hpclm.reporting.charts import Chart, charts
from hpclm.reporting.expert_history import HIGHEST, LOADS, LOWEST, NO_TOKEN, ExpertHistory
from hpclm.reporting.history import History
from hpclm.reporting.image_style import INK, encoded, new_figure, styled
from hpclm.reporting.standings import Runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = (7.2, 3.8)  # inches of an image that spans the page


def images(runs: Runs) -> dict[str, "Figure"]:
    """All charts as images, by name, without charts that have no data."""
    several = len(runs) > 1
    with styled("images", "".join(runs) if several else ""):
        drawn = {chart.place: curves(chart, chart.title) for chart in charts(runs)}
        for name, history in runs.items():
            suffix = f" {name}" if several else ""
            if history.experts:
                drawn[f"expert load{suffix}"] = _heat_maps(history.experts)
            if history.attempts:
                drawn[f"attempts{suffix}"] = _timeline(history)
        return drawn


def curves(chart: Chart, title: str) -> "Figure":
    """The curves of a chart."""
    figure, axes = new_figure(*WIDE) if chart.wide else new_figure(5.2, 2.7)
    for curve in chart.layers:
        colour = curve.colour or INK
        if curve.band:
            axes.fill_between(*curve.band, color=colour, alpha=0.15, lw=0)
        label = curve.name if curve.name in chart.legend else None
        axes.plot(*curve.line, "o-" if curve.dots else "-", ms=3, color=colour, lw=1.4, label=label)
        if curve.left:
            axes.plot(*curve.left, "x", color=colour, ms=9, mew=2.5, clip_on=False)
    axes.set(xlabel="step", ylabel=chart.unit, yscale="log" if chart.log else "linear")
    axes.set(xlim=(chart.first, chart.last), ylim=(chart.bottom, chart.top))
    axes.set_title(title, parse_math=False)
    if chart.thousands:
        axes.yaxis.set_major_formatter("{x:,.0f}")
    if chart.legend:
        axes.legend(fontsize=8.5, reverse=True)
    return figure


def loss_png(history: History, title: str) -> bytes | None:
    """The loss curves of a run for a notebook; None without a finite loss."""
    with styled("a live plot"):
        chart = next(charts({"": history}), None)
        if chart is None or chart.key != "loss":
            return None
        return encoded(curves(chart, title), dpi=100)


def _heat_maps(load: ExpertHistory) -> "Figure":
    """The load of every expert over the steps, a panel for each layer."""
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.figure import Figure

    lines = math.ceil(len(load.blocks) / 2)
    figure = Figure(figsize=(WIDE[0], 0.9 + 1.6 * lines), layout="constrained")
    panels = figure.subplots(lines, 2, sharex=True, squeeze=False).ravel()
    style = {"cmap": ListedColormap(LOADS, under=NO_TOKEN), "norm": LogNorm(LOWEST, HIGHEST), "interpolation": "none"}
    for axes, heat_map in zip(panels, load.heat_maps, strict=False):
        shown = heat_map.percent.clip(math.ceil(LOWEST))
        shown[heat_map.percent == 0] = 1  # 0 has no logarithm
        ends = (heat_map.first, heat_map.last, -0.5, heat_map.experts - 0.5)
        drawn = axes.imshow(shown, extent=ends, aspect="auto", origin="lower", **style)
        axes.set_title(heat_map.title, fontsize=9)
        axes.grid(visible=False)
    for axes in panels[len(load.blocks) :]:
        axes.set_visible(False)
    figure.colorbar(drawn, ax=panels, extend="min", label="load of an expert, % of the mean")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("expert", fontsize=9)
    return figure


def _timeline(history: History) -> "Figure":
    from matplotlib.patches import Patch

    attempts = history.attempts
    unit, size = timeline.unit(history.wall)
    figure, axes = new_figure(WIDE[0], 1.1 + 0.55 * min(len(attempts), 40))
    for attempt in attempts:
        for phase in attempt.phases:
            left = (phase.begin - attempts[0].begin) / size
            hatch = "///" if phase.kind == "lost" else None
            colour = timeline.COLOURS[phase.kind]
            axes.barh(attempt.number, phase.seconds / size, left=left, height=0.5, color=colour, hatch=hatch)
        at = attempt.end
        side = "right"
        if attempt.begin - attempts[0].begin < history.wall / 2:
            at = attempt.begin
            side = "left"
        place = ((at - attempts[0].begin) / size, attempt.number - 0.29)
        label = textwrap.shorten(timeline.label(attempt), 90, placeholder="…")
        axes.text(*place, label, fontsize=8, ha=side, va="bottom", parse_math=False)
    patches = [Patch(color=colour, label=kind) for kind, colour in timeline.kinds([history]).items()]
    axes.legend(handles=patches, ncols=max(1, len(patches)), fontsize=9, loc="lower left", bbox_to_anchor=(0, 1))
    axes.set(xlabel=f"{unit} since the run was first queued or started", ylabel="attempt")
    axes.set(ylim=(len(attempts) + 0.4, 0.3), yticks=range(1, len(attempts) + 1, max(1, len(attempts) // 20)))
    axes.grid(axis="y", visible=False)
    return figure
