"""The charts of a page, which show their values under the pointer. Only this file imports bokeh.

bokeh's library, one file of 1.3 MB, is part of the page. It draws only the area between the axes. Titles, names and captions are HTML,
which wraps on a phone and cannot contain markup from a run.
"""

import json
import math
from typing import TYPE_CHECKING, Any

from hpclm.base import extras
from hpclm.reporting.charts import Chart
from hpclm.reporting.expert_history import HIGHEST, LOADS, LOWEST, NO_TOKEN, RANGE, HeatMap

if TYPE_CHECKING:
    from bokeh.plotting import figure

INK = "#747c85"  # axes, their text and grey curves: legible on white and on black
LOADER = """for (const each of document.querySelectorAll("script[type='application/json']"))
  Bokeh.embed.embed_item(JSON.parse(each.textContent));
document.addEventListener("click", event => {
  const {clientX, clientY, pointerType} = event, move = {clientX, clientY, view: window, bubbles: true, isPrimary: true};
  if (pointerType == "touch") event.composedPath()[0].dispatchEvent(new PointerEvent("pointermove", move));
});"""
"""Draws the charts. A tap shows values, as a mouse at that place does."""


def scripts() -> list[str]:
    """The JavaScript that draws charts."""
    with extras.needed_for("hpclm report"):
        from bokeh.resources import Resources
    return ["\n".join(Resources(mode="inline", components=["bokeh"]).js_raw), LOADER]


def embedded(drawn: Chart | HeatMap) -> str:
    """A chart as JSON for ``LOADER``, which puts it into the element with the id ``drawn.place``."""
    from bokeh.embed import json_item

    plot = _curves(drawn) if isinstance(drawn, Chart) else _heat_map(drawn)
    return json.dumps(json_item(plot) | {"target_id": drawn.place}).replace("<", r"\u003c")


def _curves(chart: Chart) -> "figure":
    from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, PrintfTickFormatter

    plot = _axes(chart.first, chart.last, chart.bottom, chart.top, chart.unit, chart.log)
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0") if chart.thousands else PrintfTickFormatter(format="%.4g")
    if len(chart.log_ticks) > 2:
        plot.yaxis.ticker = (
            chart.log_ticks
        )  # below two decades, bokeh would space ticks evenly, most of them at the top
    for curve in chart.layers:
        style: Any = {"color": curve.colour or INK, "alpha": 1.0 if curve.colour else 0.4}
        if curve.band:
            plot.varea(*curve.band, color=curve.colour, alpha=0.15)
        plot.line(*curve.line, line_width=1.8, **style)
        if curve.dots:
            plot.scatter(*curve.line, size=5, **style)
        if curve.left:
            step, value = curve.left
            cross: Any = {"marker": "x", "size": 14, "line_width": 3, "level": "overlay"}
            plot.scatter([step], [value], color=curve.colour or INK, **cross)
    # anchors on the axis find the pointer's step, so that values outside the chart are shown too
    values = [dict(zip(curve.steps.tolist(), chart.said(curve), strict=True)) for curve in chart.coloured]
    steps = sorted(set().union(*values))
    columns: dict[str, Any] = {"step": steps, "height": [chart.bottom for _ in steps]}
    columns |= {f"v{number}": [said.get(step, "–") for step in steps] for number, said in enumerate(values)}
    anchors = plot.line("step", "height", source=ColumnDataSource(columns), line_alpha=0)
    mean = f", mean of {chart.group}" if chart.group > 1 else ""
    names = [(curve.name or "value", f"@v{number}") for number, curve in enumerate(chart.coloured)]
    tooltips = [("step", f"@step{{0}}{mean}"), *names]
    options: Any = {"mode": "vline", "line_policy": "nearest", "point_policy": "follow_mouse"}
    plot.add_tools(HoverTool(renderers=[anchors], tooltips=tooltips, **options))
    return plot


def _heat_map(heat_map: HeatMap) -> "figure":
    from bokeh.models import BasicTicker, HoverTool, LogColorMapper

    plot = _axes(heat_map.first, heat_map.last, -0.5, heat_map.experts - 0.5, "expert")
    plot.grid.grid_line_color = None
    plot.yaxis.ticker = BasicTicker(min_interval=1)
    # extend the scale's first colour below 1 %, so that only a load of 0 has the colour NO_TOKEN
    below = math.ceil(len(LOADS) * math.log(LOWEST) / math.log(RANGE**2))
    low = LOWEST / RANGE ** (2 * below / len(LOADS))
    palette = [*(LOADS[0] for _ in range(below)), *LOADS]
    scale = LogColorMapper(palette=palette, low=low, high=HIGHEST, low_color=NO_TOKEN)
    image: Any = {"image": [heat_map.percent], "color_mapper": scale}
    plot.image(x=heat_map.first, y=-0.5, dw=heat_map.last - heat_map.first, dh=heat_map.experts, **image)
    plot.add_tools(HoverTool(tooltips=[("step", "$x{0}"), ("expert", "$y{0}"), ("load", "@image% of the mean")]))
    return plot


def _axes(first: float, last: float, bottom: float, top: float, unit: str, log: bool = False) -> "figure":
    from bokeh.models import NumeralTickFormatter, Range1d
    from bokeh.plotting import figure

    plot = figure(
        height=300,  # pixels
        sizing_mode="stretch_width",
        x_range=Range1d(start=first, end=last),
        y_range=Range1d(start=bottom, end=top),
        y_axis_type="log" if log else "linear",
        tools="box_zoom,reset,save",
        active_drag=None,  # dragging a finger scrolls the page
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
    )
    plot.toolbar.update(logo=None, autohide=True)
    plot.grid.grid_line_color = INK
    plot.grid.grid_line_alpha = 0.2
    for axis, label in ((plot.xaxis[0], "step"), (plot.yaxis[0], unit)):
        axis.update(axis_label=label, axis_line_color=INK, major_tick_line_color=INK, minor_tick_line_color=None)
        for kind in ("axis_label", "major_label"):
            font = {"color": INK, "font": "system-ui, sans-serif", "font_style": "normal", "font_size": "12px"}
            axis.update(**{f"{kind}_text_{name}": value for name, value in font.items()})
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    return plot
