"""What the charts of a report show: curves averaged over groups of steps, on axes that a diverged run does not rescale.

P points in a curve. The page and the images are both drawn from these.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median_low
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hpclm.errors import ExitCode
from hpclm.reporting.experts import OVER_LAYERS
from hpclm.reporting.history import History
from hpclm.rundir.metric_names import EXPERT_FIGURES

POINTS = 120  # of a curve; of more steps the mean of each few is a point
TAIL = 5  # last steps without a healthy loss that make a run diverged
STEEP = 0.05  # part of a curve of losses, its start, that need not be on the chart
USUAL_MAXIMA = 10  # times the usual maximum of the gradient norm, beyond which it is off the chart
COLOURS = ("#2f7ed8", "#e8762d", "#2a9d5c", "#b455c8", "#c0392b", "#8d6e3f", "#11999e", "#d1a000")
"""Of the first curves; those of further runs are grey."""
FEW = 40  # points, each of which is worth a mark
TITLES = {
    # key: title and unit; the losses of one run are in one chart
    "loss": ("Loss", "nats per token"),
    "validation_loss": ("Validation loss", "nats per token"),
    "training_loss": ("Training loss", "nats per token"),
    "grad_norm": ("Gradient norm", "log scale"),
    "lr": ("Learning rate", ""),
    "tokens_per_second": ("Speed", "tokens/s"),
    "expert_load_max": ("Largest load of an expert", "times the mean"),
    "expert_entropy": ("Entropy of the experts' shares", "1: all alike"),
    "dead_experts": ("Experts without a token", ""),
    "balance_loss_sequence": ("Balance loss of sequences", ""),
    "balance_loss_step": ("Balance loss by the step before", ""),
    "balance_loss_micro_batch": ("Balance loss of micro-batches", ""),
    "router_z_loss": ("Router z-loss", ""),
}
OF_EXPERTS = (*EXPERT_FIGURES, *(key for key in TITLES if key.startswith(("balance_loss_", "router_"))))
"""Keys of charts in a separate section."""
LOSSES = ("loss", "validation_loss", "training_loss")
Array = NDArray[np.float64]
Pairs = tuple[Array, Array]
"""Steps in order and values, NaN where a value was not finite: [N] each."""
Runs = Mapping[str, History]


@dataclass(frozen=True, eq=False)
class Curve:
    """Values over the steps; NaN where none was finite."""

    name: str
    steps: Array
    """[P], the middle of each group of steps."""
    mean: Array
    low: Array
    """[P], the lowest of each group."""
    high: Array
    left: tuple[float, float] | None
    """Step and value at which a diverged run leaves the chart."""

    @property
    def line(self) -> tuple[Array, Array]:
        """Steps and values that are drawn: those before it leaves the chart, and where it does."""
        end = np.array([self.left or ()]).T
        return np.append(self.steps[: self.kept], end[:1]), np.append(self.mean[: self.kept], end[1:])

    @property
    def kept(self) -> int:
        """Points before it leaves the chart."""
        return int(np.searchsorted(self.steps, self.left[0])) if self.left else len(self.steps)

    @property
    def dots(self) -> bool:
        """Whether each point is worth a mark."""
        return len(self.steps) <= FEW


@dataclass(frozen=True, eq=False)
class Chart:
    """Curves on common axes."""

    key: str
    """One of TITLES, or the name of what the user's code reports."""
    curves: tuple[Curve, ...]
    first: float
    last: float
    """Ends of the steps."""
    bottom: float
    top: float
    group: int
    """Steps of which each point is the mean."""

    @property
    def reported(self) -> bool:
        """Whether it shows what the user's code reports."""
        return self.key not in TITLES

    @property
    def section(self) -> str:
        """The heading that it stands below."""
        return "Experts" if self.key in OF_EXPERTS else "Own metrics" if self.reported else "Curves"

    @property
    def title(self) -> str:
        """Of the chart."""
        return self.key if self.reported else TITLES[self.key][0]

    @property
    def unit(self) -> str:
        """Of its values."""
        return "" if self.reported else TITLES[self.key][1]

    @property
    def place(self) -> str:
        """A name for files and elements of a page."""
        return f"reported-{crc32(self.key.encode(errors='surrogatepass')):08x}" if self.reported else self.key

    @property
    def layers(self) -> list[Curve]:
        """The curves from the bottom to the top: the best one last, but short ones above long ones."""
        return sorted(reversed(self.curves), key=lambda curve: -len(curve.steps))

    @property
    def log(self) -> bool:
        """Whether the vertical axis is logarithmic."""
        return self.key == "grad_norm"


def charts(runs: Runs) -> list[Chart]:
    """The charts for which there are numbers; the losses of one run are in one chart."""
    limit = ceiling(runs)
    ends = {name: diverged(history, limit) for name, history in runs.items()}
    drawn = []
    for key, lines in (_of_one if len(runs) == 1 else _of_several)(runs):
        if any(np.isfinite(values).any() for _, values in lines.values()):
            lost = ends if len(runs) > 1 else dict.fromkeys(lines, *ends.values())
            drawn.append(_chart(key, lines, limit, lost if is_loss(key) else {}))
    return drawn


def ceiling(runs: Runs) -> float:
    """The loss above which none is healthy: a little more than what most runs began with, or usually have."""
    losses = [_finite(history.steps["loss"]) for history in runs.values()]
    finite = [run_losses for run_losses in losses if len(run_losses)]
    if not finite:
        return math.inf
    usual = [
        float(np.partition(run_losses, (len(run_losses) - 1) // 2)[(len(run_losses) - 1) // 2]) for run_losses in finite
    ]
    return 1.1 * max(median_low([float(run_losses[:3].max()) for run_losses in finite]), median_low(usual))


def diverged(history: History, limit: float) -> int | None:
    """The step from which on no loss was finite and below ``limit``; None if the run did not end so."""
    healthy = np.flatnonzero(history.steps["loss"] <= limit)
    tail = len(history.steps) - (int(healthy[-1]) + 1 if len(healthy) else 0)
    stopped = bool(history.attempts) and history.attempts[-1].code == ExitCode.DIVERGED
    return int(history.steps["step"][-tail]) if tail >= (1 if stopped else TAIL) else None


def is_loss(key: str) -> bool:
    """Whether a chart shows losses of a run, of which those of one that diverged leave it."""
    return key in LOSSES


def _finite(values: Array) -> Array:
    return values[np.isfinite(values)]


def validation(history: History) -> dict[int, float | None]:
    """The loss on held-out data by step, the mean of its parts; None where it was not finite."""
    by_step: dict[int, list[float | None]] = {}
    for row in history.evaluations:
        by_step.setdefault(row["step"], []).append(row["validation_loss"])
    return {
        step: None if None in losses else sum(filter(None, losses)) / len(losses) for step, losses in by_step.items()
    }


def _of_one(runs: Runs) -> Iterator[tuple[str, dict[str, Pairs]]]:
    [(name, history)] = runs.items()
    parts: dict[str, list[tuple[int, float | None]]] = {}
    for row in history.evaluations:
        part = row.get("part", "valid").removeprefix("valid").replace("/", " ")
        parts.setdefault(f"validation{part}", []).append((row["step"], row["validation_loss"]))
    yield "loss", {"training": _pairs(history, "loss"), **{name: _listed(pairs) for name, pairs in parts.items()}}
    for key in ("grad_norm", "lr", "tokens_per_second"):
        yield key, {name: _pairs(history, key)}
    if load := history.experts:
        for figure, values in load.figures.items():
            yield figure, {block: (load.steps, of) for block, of in zip(load.blocks, values.T, strict=True)}
    layers: dict[str, dict[str, Pairs]] = {}
    for key in history.steps.reported:  # of all layers in one chart
        reported, _, layer = key.partition("/block")
        layers.setdefault(reported if layer.isdigit() else key, {})[f"block{layer}" if layer else name] = _pairs(
            history, key
        )
    yield from layers.items()


def _of_several(runs: Runs) -> Iterator[tuple[str, dict[str, Pairs]]]:
    yield "validation_loss", {name: _listed(validation(history).items()) for name, history in runs.items()}
    yield "training_loss", {name: _pairs(history, "loss") for name, history in runs.items()}
    for key in ("grad_norm", "tokens_per_second"):  # the table has what differs in the learning rate
        yield key, {name: _pairs(history, key) for name, history in runs.items()}
    loads = {name: history.experts for name, history in runs.items() if history.experts}
    for figure, over in OVER_LAYERS.items() if loads else ():
        yield figure, {name: (load.steps, over(load.figures[figure], axis=1)) for name, load in loads.items()}
    for key in dict.fromkeys(key for history in runs.values() for key in history.steps.reported):
        able = {name: history for name, history in runs.items() if key in history.steps.reported}
        yield key, {name: _pairs(history, key) for name, history in able.items()}


def _pairs(history: History, key: str) -> Pairs:
    return history.steps["step"], history.steps[key]


def _listed(pairs: Iterable[tuple[int, float | None]]) -> Pairs:
    """Pairs of a step and a value, in the order of steps."""
    ordered = sorted(pairs, key=itemgetter(0))
    values = [math.nan if value is None else value for _, value in ordered]
    return np.array([step for step, _ in ordered], float), np.array(values, float)


def _chart(key: str, lines: Mapping[str, Pairs], limit: float, lost: Mapping[str, int | None]) -> Chart:
    alone = next(iter(lines.values()))[0] if len(lines) == 1 else np.array([])
    grid = alone if len(alone) and _increasing(alone) else np.unique(np.concatenate([s for s, _ in lines.values()]))
    group = math.ceil(len(grid) / POINTS)
    bands = {name: _averaged(pairs, grid, group) for name, pairs in lines.items() if len(pairs[0])}
    healthy = [band for name, band in bands.items() if lost.get(name) is None and np.isfinite(band[1]).any()]
    bottom, top = _range(key, healthy or [*bands.values()], limit)
    curves = []
    for name, band in bands.items():
        step = lost.get(name)
        left = None if step is None or lines[name][0][-1] < step else _leaves(*band[:2], top)
        curves.append(Curve(name, *band, left))
    return Chart(key, tuple(curves), float(grid[0]), float(grid[-1]), bottom, top, group)


def _averaged(pairs: Pairs, grid: Array, group: int) -> tuple[Array, Array, Array, Array]:
    """Steps, and the mean, lowest and highest finite value, of each group of the steps in ``grid``: [P] each."""
    steps, values = pairs
    if not _increasing(steps):
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    numbers = (np.arange(len(steps)) if steps is grid else np.searchsorted(grid, steps)) // group
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    groups = numbers[starts]
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite.astype(float), starts)
    with np.errstate(invalid="ignore"):  # 0 / 0: none of a group is finite
        mean = np.add.reduceat(np.where(finite, values, 0.0), starts) / counts
    middles = grid[np.minimum(groups * group + group // 2, len(grid) - 1)]
    return middles, mean, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def _increasing(steps: Array) -> bool:
    """Whether the steps of a run are in order, each once: sorting millions of them takes seconds."""
    return bool((np.diff(steps) > 0).all())


def _range(key: str, bands: Sequence[tuple[Array, ...]], limit: float) -> tuple[float, float]:
    """The lowest and highest value of an axis; of losses at most ``limit``, and without their steep start."""
    skip = STEEP if is_loss(key) else 0
    shown = [line[int(skip * len(line)) :] for _, *band in bands for line in band]
    values = np.concatenate([line[np.isfinite(line)] for line in shown])
    if key == "grad_norm":
        values = values[values > 0]
        limit = USUAL_MAXIMA * median_low([float(np.nanmax(mean)) for _, mean, *_ in bands if np.isfinite(mean).any()])
    elif key not in TITLES:
        limit = math.inf
    elif not is_loss(key):
        return 0.0, 1.08 * float(values.max()) or 1.0
    values = values[values <= limit]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.1, 1.0)
    if key == "grad_norm":
        return low / 1.2, high * 1.2
    room = (high - low or 1.0) / 20
    return low - room, high + room


def _leaves(steps: Array, mean: Array, top: float) -> tuple[float, float]:
    """Where the curve of a run that diverged leaves the chart: after its last point below ``top``."""
    inside = np.flatnonzero(mean <= top)
    at = min(int(inside[-1]) + 1 if len(inside) else 0, len(steps) - 1)  # the last group may be healthy in part
    before = mean[:at][np.isfinite(mean[:at])]
    return float(steps[at]), top if mean[at] > top or not len(before) else float(min(before[-1], top))


@dataclass(frozen=True)
class Standing:
    """How far a run got."""

    name: str
    best: float | None
    """The lowest validation loss, nats per token."""
    best_step: int | None
    training: float | None
    """Mean training loss of the last ``over`` steps, nats per token; None where the run diverged."""
    over: int
    diverged: int | None
    """The step from which on it was not healthy."""

    @property
    def key(self) -> tuple[bool, bool, float]:
        """Sorts by validation loss, then by training loss; runs that diverged come last."""
        figure = self.training if self.best is None else self.best
        return self.diverged is not None, self.best is None, math.inf if figure is None else figure


def ranked(runs: Runs) -> list[Standing]:
    """All runs, the best first."""
    limit = ceiling(runs)
    return sorted((standing(name, history, limit) for name, history in runs.items()), key=lambda entry: entry.key)


def ordered(runs: Runs) -> Runs:
    """The runs, the best first: the order of their colours."""
    return {entry.name: runs[entry.name] for entry in ranked(runs)}


def standing(name: str, history: History, limit: float) -> Standing:
    """How a run stands; ``limit``: the highest healthy loss."""
    since = diverged(history, limit)
    held_out = [(loss, step) for step, loss in validation(history).items() if loss is not None]
    best, step = min(held_out, default=(None, None))
    losses = [row["loss"] for row in history.recent if row.get("loss") is not None]
    training = sum(losses) / len(losses) if losses and since is None else None
    return Standing(name, best, step, training, len(losses), since)
