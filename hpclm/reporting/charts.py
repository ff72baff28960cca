"""The charts of a report as data: curves averaged over groups of steps, on axes that a diverged run does not rescale.

plots.py draws the charts on the page; images.py draws them as images and in a notebook. A curve has P points.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median_low
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hpclm.base.metric_names import EXPERT_FIGURES
from hpclm.reporting.datasets_read import tokens_read
from hpclm.reporting.expert_history import OVER_LAYERS
from hpclm.reporting.history import History
from hpclm.reporting.standings import Runs, diverged, healthy_limit, ranked, validation

POINTS = 120  # most points of a curve; with more steps, each point is the mean of a group of steps
STEEP = 0.05  # this first fraction of a loss curve may be off the chart
USUAL_MAXIMA = 10  # the gradient norm is off the chart above this many times its usual maximum
FEW = 40  # up to this many points, each has a dot
COLOURS = ("#2f7ed8", "#e8762d", "#2a9d5c", "#b455c8", "#c0392b", "#8d6e3f", "#11999e", "#d1a000")
"""Colours of the first curves; further ones are grey."""
TITLES = {
    # key: title and unit; the losses of one run are in one chart
    "loss": ("Loss", "nats per token"),
    "validation_loss": ("Validation loss", "nats per token"),
    "training_loss": ("Training loss", "nats per token"),
    "grad_norm": ("Gradient norm", "log scale"),
    "lr": ("Learning rate", ""),
    "tokens_per_second": ("Speed", "tokens/s"),
    "tokens_read": ("Tokens read of each dataset", "tokens"),
    "expert_load_max": ("Largest load of an expert", "times the mean"),
    "expert_entropy": ("Entropy of the experts' shares", "1: all alike"),
    "dead_experts": ("Experts without a token", ""),
    "balance_loss_sequence": ("Balance loss of sequences", ""),
    "balance_loss_step": ("Balance loss by the step before", ""),
    "balance_loss_micro_batch": ("Balance loss of micro-batches", ""),
    "router_z_loss": ("Router z-loss", ""),
}
LOSSES = ("loss", "validation_loss", "training_loss")
OF_EXPERTS = (*EXPERT_FIGURES, *(key for key in TITLES if key.startswith(("balance_loss_", "router_"))))
"""Keys of charts in a section about experts."""
Array = NDArray[np.float64]
Pairs = tuple[Array, Array]
"""Steps in order and their values, [N] each; NaN where a value was not finite."""
Lines = Mapping[str, Pairs]
"""The data of a chart, by the names of its curves."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Values over the steps; NaN for a group without a finite value."""

    name: str
    colour: str | None
    """None: grey, without a name in the legend."""
    steps: Array
    """[P], the middle of each group of steps."""
    mean: Array
    low: Array
    """[P], the lowest value of each group."""
    high: Array
    left: tuple[float, float] | None
    """Step and value at which a diverged run leaves the chart; a cross marks it."""

    @property
    def kept(self) -> int:
        """The number of points before the curve leaves the chart."""
        if self.left is None:
            return len(self.steps)
        return int(np.searchsorted(self.steps, self.left[0]))

    @property
    def line(self) -> tuple[Array, Array]:
        """Steps and values of the line, up to the first point outside the chart."""
        end = np.array([self.left or ()]).T
        return np.append(self.steps[: self.kept], end[:1]), np.append(self.mean[: self.kept], end[1:])

    @property
    def band(self) -> tuple[Array, Array, Array] | None:
        """Steps, lowest and highest values of the band around the line; None without one."""
        if self.colour is None or not (self.low < self.high).any():
            return None
        return self.steps[: self.kept], self.low[: self.kept], self.high[: self.kept]

    @property
    def dots(self) -> bool:
        """Whether to draw a dot at each point."""
        return len(self.steps) <= FEW


@dataclass(frozen=True, eq=False)
class Chart:
    """Curves on common axes."""

    key: str
    """One of TITLES, or the name of a metric that the user's code reports."""
    curves: tuple[Curve, ...]
    first: float
    last: float
    """The ends of the horizontal axis, in steps."""
    bottom: float
    top: float
    """The ends of the vertical axis."""
    group: int
    """The number of steps in each point's mean."""

    @property
    def reported(self) -> bool:
        """Whether the chart shows a metric that the user's code reports."""
        return self.key not in TITLES

    @property
    def section(self) -> str:
        """The heading of the page's section with the chart."""
        if self.key in OF_EXPERTS:
            return "Experts"
        return "Own metrics" if self.reported else "Curves"

    @property
    def title(self) -> str:
        """The heading of the chart."""
        return TITLES.get(self.key, (self.key, ""))[0]

    @property
    def unit(self) -> str:
        """The label of the vertical axis."""
        return TITLES.get(self.key, (self.key, ""))[1]

    @property
    def place(self) -> str:
        """A name for the chart's image file and for its element on the page."""
        if self.reported:
            return f"reported-{crc32(self.key.encode(errors='surrogatepass')):08x}"
        return self.key

    @property
    def wide(self) -> bool:
        """Whether its image is as wide as a page."""
        return self.key in LOSSES

    @property
    def log(self) -> bool:
        """Whether the vertical axis is logarithmic."""
        return self.key == "grad_norm"

    @property
    def log_ticks(self) -> list[float]:
        """Ticks of a logarithmic axis: 1, 2 and 5 of each decade, or only 1 above three decades."""
        if not self.log:
            return []
        marks = (1, 2, 5) if self.top < 1000 * self.bottom else (1,)
        decades = range(math.floor(math.log10(self.bottom)), math.floor(math.log10(self.top)) + 1)
        ticks = [mark * 10.0**decade for decade in decades for mark in marks]
        return [tick for tick in ticks if self.bottom <= tick <= self.top]

    @property
    def thousands(self) -> bool:
        """Whether to show values as whole numbers with commas."""
        return self.key in ("tokens_per_second", "tokens_read")

    @property
    def layers(self) -> list[Curve]:
        """The curves in the order of drawing: long curves first, and the best run last among equally long curves."""
        return sorted(reversed(self.curves), key=lambda curve: -len(curve.steps))

    @property
    def coloured(self) -> list[Curve]:
        """The curves with a colour, a name in the legend and values under the pointer."""
        return [curve for curve in self.curves if curve.colour]

    @property
    def legend(self) -> dict[str, str | None]:
        """Name -> colour of each entry; empty for a single curve."""
        if len(self.curves) < 2:
            return {}
        entries = {curve.name: curve.colour for curve in self.coloured}
        grey = len(self.curves) - len(entries)
        return {**entries, f"{grey} more": None} if grey else entries

    @property
    def clipped(self) -> bool:
        """Whether the value of any single step is above the top."""
        return any((curve.high[: curve.kept] > self.top).any() for curve in self.curves)

    def said(self, curve: Curve) -> list[str]:
        """The value of each point in words."""
        points = zip(curve.mean.tolist(), curve.low.tolist(), curve.high.tolist(), strict=True)
        return [self._said(*point) for point in points]

    def _said(self, mean: float, low: float, high: float) -> str:
        if math.isnan(mean):
            return "not finite"
        text = f"{mean:,.0f}" if self.thousands else f"{mean:.4g}"
        if low < high:
            text += f" ({low:,.4g} to {high:,.4g})"
        return f"{text} – off the chart" if mean > self.top else text


def colours(names: Iterable[str]) -> dict[str, str]:
    """The colours of the first names."""
    return dict(zip(names, COLOURS, strict=False))


def charts(runs: Runs) -> Iterator[Chart]:
    """The charts with numbers, in order. For a single run, the first chart has all losses."""
    runs = {standing.name: runs[standing.name] for standing in ranked(runs)}
    limit = healthy_limit(runs)
    ends = {name: diverged(history, limit) for name, history in runs.items()}
    several = len(runs) > 1
    for key, lines in _of_several(runs) if several else _of_one(runs):
        if any(np.isfinite(values).any() for _, values in lines.values()):
            lost = ends if several else dict.fromkeys(lines, *ends.values())
            if key not in LOSSES:
                lost = {}
            yield _chart(key, lines, limit, lost, colours(runs if several else lines))


def _of_one(runs: Runs) -> Iterator[tuple[str, Lines]]:
    [(name, history)] = runs.items()
    parts: dict[str, list[tuple[int, float | None]]] = {}
    for row in history.evaluations:
        part = row.get("part", "valid").removeprefix("valid").replace("/", " ")
        parts.setdefault(f"validation{part}", []).append((row["step"], row["validation_loss"]))
        if "validation_loss_ema" in row:
            parts.setdefault(f"validation{part}, averaged weights", []).append(
                (row["step"], row["validation_loss_ema"])
            )
    yield "loss", {"training": _pairs(history, "loss"), **{name: _listed(pairs) for name, pairs in parts.items()}}
    for key in ("grad_norm", "lr", "tokens_per_second"):
        yield key, {name: _pairs(history, key)}
    yield "tokens_read", tokens_read(history.phases)
    if load := history.experts:
        for figure, values in load.figures.items():
            yield figure, {block: (load.steps, of) for block, of in zip(load.blocks, values.T, strict=True)}
    layers: dict[str, dict[str, Pairs]] = {}
    for key in history.steps.reported:  # all layers of a metric share a chart
        metric, _, layer = key.partition("/block")
        if layer.isdigit():
            layers.setdefault(metric, {})[f"block{layer}"] = _pairs(history, key)
        else:
            layers.setdefault(key, {})[name] = _pairs(history, key)
    yield from layers.items()


def _of_several(runs: Runs) -> Iterator[tuple[str, Lines]]:
    yield "validation_loss", {name: _listed(validation(history).items()) for name, history in runs.items()}
    yield "training_loss", {name: _pairs(history, "loss") for name, history in runs.items()}
    for key in ("grad_norm", "tokens_per_second"):  # differences in the learning rate are in the table
        yield key, {name: _pairs(history, key) for name, history in runs.items()}
    loads = {name: history.experts for name, history in runs.items() if history.experts}
    if loads:
        for figure, over in OVER_LAYERS.items():
            yield figure, {name: (load.steps, over(load.figures[figure], axis=1)) for name, load in loads.items()}
    for key in dict.fromkeys(key for history in runs.values() for key in history.steps.reported):
        yield key, {name: _pairs(history, key) for name, history in runs.items() if key in history.steps.reported}


def _pairs(history: History, key: str) -> Pairs:
    return history.steps["step"], history.steps[key]


def _listed(pairs: Iterable[tuple[int, float | None]]) -> Pairs:
    """Pairs of a step and a value, in the order of steps."""
    ordered = sorted(pairs, key=itemgetter(0))
    return np.array([step for step, _ in ordered], float), np.array([value for _, value in ordered], float)


def _chart(key: str, lines: Lines, limit: float, lost: Mapping[str, int | None], colour: Mapping[str, str]) -> Chart:
    """``limit``: the highest healthy loss. ``lost``: the step at which a curve's run diverged."""
    grid = _grid([steps for steps, _ in lines.values()])
    group = math.ceil(len(grid) / POINTS)
    bands = {name: _averaged(pairs, grid, group) for name, pairs in lines.items() if len(pairs[0])}
    healthy = [band for name, band in bands.items() if lost.get(name) is None and np.isfinite(band[1]).any()]
    bottom, top = _range(key, healthy or [*bands.values()], limit)
    curves = []
    for name, (steps, mean, low, high) in bands.items():
        since = lost.get(name)
        left = None
        if since is not None and lines[name][0][-1] >= since:
            left = _leaves(steps, mean, top)
        curves.append(Curve(name, colour.get(name), steps, mean, low, high, left))
    first = float(grid[0])
    last = float(grid[-1])
    return Chart(key, tuple(curves), first, max(last, first + 1), bottom, top, group)


def _grid(steps: Sequence[Array]) -> Array:
    if len(steps) == 1 and len(steps[0]) and _increasing(steps[0]):
        return steps[0]
    return np.unique(np.concatenate(steps))


def _averaged(pairs: Pairs, grid: Array, group: int) -> tuple[Array, Array, Array, Array]:
    """Steps, and the mean, lowest and highest finite value, of each group of the steps in ``grid``: [P] each."""
    steps, values = pairs
    if not _increasing(steps):
        order = np.argsort(steps, kind="stable")
        steps = steps[order]
        values = values[order]
    places = np.arange(len(steps)) if steps is grid else np.searchsorted(grid, steps)
    numbers = places // group
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    groups = numbers[starts]
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite.astype(float), starts)
    with np.errstate(invalid="ignore"):  # 0 / 0 for a group without a finite value
        mean = np.add.reduceat(np.where(finite, values, 0.0), starts) / counts
    middles = grid[np.minimum(groups * group + group // 2, len(grid) - 1)]
    return middles, mean, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def _increasing(steps: Array) -> bool:
    """Whether the steps are strictly increasing. Sorting millions of steps would take seconds."""
    return bool((np.diff(steps) > 0).all())


def _range(key: str, bands: Sequence[tuple[Array, ...]], limit: float) -> tuple[float, float]:
    """The ends of the vertical axis. For losses: at most ``limit``, and without their steep start."""
    skip = STEEP if key in LOSSES else 0
    shown = [line[int(skip * len(line)) :] for _, *band in bands for line in band]
    values = np.concatenate([line[np.isfinite(line)] for line in shown])
    if key == "grad_norm":
        values = values[values > 0]
        limit = USUAL_MAXIMA * median_low([float(np.nanmax(mean)) for _, mean, *_ in bands if np.isfinite(mean).any()])
    elif key not in TITLES:
        limit = math.inf
    elif key not in LOSSES:
        return 0.0, 1.08 * float(values.max()) or 1.0
    values = values[values <= limit]
    low = float(values.min(initial=math.inf))
    high = float(values.max(initial=-math.inf))
    if not len(values):
        low = 0.1
        high = 1.0
    if key == "grad_norm":
        return low / 1.2, high * 1.2
    room = (high - low or 1.0) / 20
    return low - room, high + room


def _leaves(steps: Array, mean: Array, top: float) -> tuple[float, float]:
    """The point at which the curve of a diverged run leaves the chart, after its last point below ``top``."""
    after = int(np.flatnonzero(mean <= top).max(initial=-1)) + 1
    at = min(after, len(steps) - 1)  # the last group may be partly healthy
    before = mean[:at][np.isfinite(mean[:at])]
    if mean[at] > top or not len(before):
        return float(steps[at]), top
    return float(steps[at]), float(min(before[-1], top))
