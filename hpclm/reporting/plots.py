"""The charts of the page, which show their values under the pointer. The only file that imports bokeh.

Its library is one file of 1.3 MB that goes into the page. It draws only what is between the axes: titles, names and captions
are HTML, which wraps on a phone, and into which nothing can be smuggled.
"""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpclm import extras
from hpclm.reporting.curves import Chart, Curve
from hpclm.reporting.experts import LOADS, NO_TOKEN, RANGE, ExpertHistory

if TYPE_CHECKING:
    from bokeh.plotting import figure

INK = "#747c85"  # of axes and their text: legible on white and on black
HEIGHT = 300  # pixels
FONT = "system-ui, sans-serif"
LOADER = """for (const each of document.querySelectorAll("script[type='application/json']"))
  Bokeh.embed.embed_item(JSON.parse(each.textContent));
document.addEventListener("click", event => {
  const {clientX, clientY, pointerType} = event, move = {clientX, clientY, view: window, bubbles: true, isPrimary: true};
  if (pointerType == "touch") event.composedPath()[0].dispatchEvent(new PointerEvent("pointermove", move));
});"""
"""Draws the charts. A tap shows values, as does a mouse that moves there."""


def scripts() -> list[str]:
    """The JavaScript that draws charts."""
    with extras.needed_for("hpclm report"):
        from bokeh.resources import Resources
    return ["\n".join(Resources(mode="inline", components=["bokeh"]).js_raw), LOADER]


def drawn(chart: Chart, colours: Mapping[str, str]) -> str:
    """A chart as JSON for ``LOADER``, which puts it into the element whose id is the chart's place.

    ``colours``: of curves by name; the others are grey and have no values under the pointer.
    """
    from bokeh.embed import json_item

    return json.dumps(json_item(_plot(chart, colours)) | {"target_id": chart.place}).replace("<", r"\u003c")


def heat_map_place(layer: int) -> str:
    """The id of the element that a heat map is put into."""
    return f"expert-load-{layer}"


def drawn_heat_map(load: ExpertHistory, layer: int) -> str:
    """The load of each expert of a layer over the steps, as ``drawn``; ``layer``: counted among those with experts."""
    from bokeh.embed import json_item
    from bokeh.models import BasicTicker, HoverTool, LogColorMapper

    first, last, experts = float(load.edges[0]), float(load.edges[-1]), load.load.shape[2]
    plot = _axes((first, last), (-0.5, experts - 0.5), "expert")
    plot.grid.grid_line_color = None
    plot.yaxis.ticker = BasicTicker(min_interval=1)
    # the scale's first colour goes on below its end, to less than 1 %: only what is 0 has the colour of no token
    below = math.ceil(len(LOADS) * math.log(100 / RANGE) / math.log(RANGE**2))
    low = 100 / RANGE / RANGE ** (2 * below / len(LOADS))
    scale = LogColorMapper(palette=[LOADS[0]] * below + [*LOADS], low=low, high=100 * RANGE, low_color=NO_TOKEN)
    image: Any = [load.percent(layer)]
    plot.image(image=image, x=first, y=-0.5, dw=last - first, dh=experts, color_mapper=scale)  # type: ignore[call-arg]
    plot.add_tools(HoverTool(tooltips=[("step", "$x{0}"), ("expert", "$y{0}"), ("load", "@image% of the mean")]))
    return json.dumps(json_item(plot) | {"target_id": heat_map_place(layer)})


def _axes(steps: tuple[float, float], values: tuple[float, float], unit: str, log: bool = False) -> "figure":
    """An empty chart; ``steps``, ``values``: the ends of its axes. ``log``: whether the vertical one is logarithmic."""
    from bokeh.models import NumeralTickFormatter, Range1d
    from bokeh.plotting import figure

    plot = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        x_range=Range1d(start=steps[0], end=steps[1] + (steps[0] == steps[1])),
        y_range=Range1d(start=values[0], end=values[1]),
        y_axis_type="log" if log else "linear",
        tools="box_zoom,reset,save",
        active_drag=None,  # dragging a finger scrolls the page
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = INK, 0.2
    for axis, label in ((plot.xaxis, "step"), (plot.yaxis, unit)):
        axis.axis_label = label
        axis.axis_line_color = axis.major_tick_line_color = INK
        axis.minor_tick_line_color = None
        axis.axis_label_text_color = axis.major_label_text_color = INK
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_style = "normal"
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    return plot


def _plot(chart: Chart, colours: Mapping[str, str]) -> "figure":
    from bokeh.models import NumeralTickFormatter, PrintfTickFormatter

    plot = _axes((chart.first, chart.last), (chart.bottom, chart.top), chart.unit, chart.log)
    if chart.key == "tokens_per_second":
        plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    else:
        plot.yaxis.formatter = PrintfTickFormatter(format="%.4g")
    if chart.log and len(ticks := log_ticks(chart.bottom, chart.top)) > 2:
        plot.yaxis.ticker = ticks  # bokeh's own are evenly spaced below two decades: all of them at the top
    for curve in chart.layers:
        _draw(plot, curve, colours.get(curve.name), chart.group > 1)
    _show_values(plot, chart, [curve for curve in chart.curves if curve.name in colours])
    return plot


def log_ticks(bottom: float, top: float) -> list[float]:
    """1, 2 and 5 of each decade; of more than three decades only 1."""
    marks = (1, 2, 5) if top < 1000 * bottom else (1,)
    decades = range(math.floor(math.log10(bottom)), math.floor(math.log10(top)) + 1)
    return [tick for decade in decades for mark in marks if bottom <= (tick := mark * 10.0**decade) <= top]


def _draw(plot: "figure", curve: Curve, colour: str | None, band: bool) -> None:
    shade, alpha = (colour, 1.0) if colour else (INK, 0.4)
    if band and colour:
        plot.varea(*(values[: curve.kept] for values in (curve.steps, curve.low, curve.high)), color=shade, alpha=0.15)
    plot.line(*curve.line, color=shade, alpha=alpha, line_width=1.8)
    if curve.dots:
        plot.scatter(curve.steps[: curve.kept], curve.mean[: curve.kept], color=shade, alpha=alpha, size=5)
    if curve.left:
        step, value = curve.left
        plot.scatter([step], [value], marker="x", color=shade, size=14, line_width=3, level="overlay")


def _show_values(plot: "figure", chart: Chart, curves: list[Curve]) -> None:
    """Under the pointer, the values of all ``curves`` at a step, also of those that are off the chart."""
    from bokeh.models import ColumnDataSource, HoverTool

    steps = sorted({step for curve in curves for step in curve.steps.tolist()})
    columns: dict[str, Any] = {"step": steps, "height": [chart.bottom] * len(steps)}
    for number, curve in enumerate(curves):
        bands = zip(curve.mean.tolist(), curve.low.tolist(), curve.high.tolist(), strict=True)
        values = {step: _said(*band, chart) for step, band in zip(curve.steps.tolist(), bands, strict=True)}
        columns[f"v{number}"] = [values.get(step, "–") for step in steps]
    anchors = plot.line("step", "height", source=ColumnDataSource(columns), line_alpha=0)
    about = f", mean of {chart.group}" if chart.group > 1 else ""
    rows = [(curve.name or "value", f"@v{number}") for number, curve in enumerate(curves)]
    plot.add_tools(
        HoverTool(
            renderers=[anchors],
            mode="vline",
            line_policy="nearest",
            point_policy="follow_mouse",
            tooltips=[("step", f"@step{{0}}{about}"), *rows],
        )
    )


def _said(mean: float, low: float, high: float, chart: Chart) -> str:
    """The value of a point in words."""
    if math.isnan(mean):
        return "not finite"
    text = f"{mean:,.0f}" if chart.key == "tokens_per_second" else f"{mean:.4g}"
    if low < high:
        text += f" ({low:,.4g} to {high:,.4g})"
    return text + " – off the chart" * (mean > chart.top)
