"""The load of a run's experts: figures of each layer over the steps, and a heat map of each layer's tokens.

N lines of experts.jsonl, L layers with experts, E experts in each.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpclm.base.metric_names import EXPERT_FIGURES
from hpclm.rundir.expert_figures import layer_figures
from hpclm.rundir.rows import Row

Array = NDArray[np.float64]
COLUMNS = 120  # most columns of a heat map
CELLS = 400_000  # most cells of all heat maps of a run, about; more layers and experts mean fewer columns, so that a page stays small
MIN_COLUMNS = 20
RANGE = 8.0  # the colour scale reaches from 1/RANGE of the mean to RANGE times the mean
LOWEST = 100 / RANGE
HIGHEST = 100 * RANGE  # both in percent of the mean
LOADS = ("#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b")
"""The colours of the scale."""
NO_TOKEN = "#d0009c"  # the colour of an expert without a token
LEGEND = {
    NO_TOKEN: "no token",
    LOADS[0]: f"1/{RANGE:.0f} of the mean or less",
    LOADS[len(LOADS) // 2]: "the mean",
    LOADS[-1]: f"{RANGE:.0f} times the mean or more",
}
ROUNDING = 1e-6  # a load below this fraction of the mean counts as 0
OVER_LAYERS: dict[str, Callable[..., Array]] = dict(zip(EXPERT_FIGURES, (np.max, np.min, np.sum), strict=True))
"""For each figure, the value that represents all layers."""


@dataclass(frozen=True, eq=False)
class HeatMap:
    """The load of each expert of a layer over the steps."""

    title: str
    place: str
    """The id of its element on the page."""
    first: float
    last: float
    """The first and the last step."""
    percent: NDArray[np.uint32]
    """[E, columns]: load in percent of the mean; 0 only for an expert without tokens."""

    @property
    def experts(self) -> int:
        """The number of experts."""
        return len(self.percent)


@dataclass(frozen=True, eq=False)
class ExpertHistory:
    """The load of a run's experts."""

    blocks: tuple[str, ...]
    """The names of the layers with experts."""
    steps: Array
    """[N]: the last step of each line."""
    figures: dict[str, Array]
    """[N, L], by the names EXPERT_FIGURES."""
    edges: Array
    """[columns + 1]: the steps at the edges of a heat map's columns."""
    load: Array
    """[columns, L, E]: tokens of an expert, divided by those of the mean expert of its layer."""

    @property
    def heat_maps(self) -> list[HeatMap]:
        """A heat map for each layer."""
        percent = np.ceil(100 * self.load).astype(np.uint32)  # round up, so that a single token does not become 0
        first = float(self.edges[0])
        last = float(self.edges[-1])
        return [
            HeatMap(block, f"expert-load-{layer}", first, last, percent[:, layer].T)
            for layer, block in enumerate(self.blocks)
        ]


@dataclass(frozen=True, eq=False)
class _Part:
    """The tokens of the steps after ``begin`` up to ``end``, [L, E]."""

    begin: float
    end: float
    tokens: Array


def expert_history(rows: Iterable[Row]) -> ExpertHistory | None:
    """The load of experts from the lines of experts.jsonl; None without lines. Lines of another model or out of order are ignored."""
    blocks: tuple[str, ...] = ()
    figures: list[Array] = []
    steps: list[float] = []
    parts: list[_Part] = []
    columns = 0
    width = 0.0
    for row in rows:
        tokens = np.array([*row["tokens"].values()], float)
        if not blocks:
            blocks = tuple(row["tokens"])
            columns = max(MIN_COLUMNS, min(COLUMNS, CELLS // tokens.size))
        if tuple(row["tokens"]) != blocks or (parts and tokens.shape != parts[0].tokens.shape):
            continue
        begin = parts[-1].end if parts else max(0.0, row["step"] - row["steps"])
        if row["step"] <= begin or not tokens.any(1).all():
            continue
        steps.append(row["step"])
        figures.append(layer_figures(tokens))
        _add(parts, _Part(begin, row["step"], tokens), width)
        if len(parts) > 4 * columns:  # merge the parts of a long run into wider ones
            width = (row["step"] - parts[0].begin) / columns
            narrow = parts
            parts = []
            for part in narrow:
                _add(parts, part, width)
    if not parts:
        return None
    by_name = dict(zip(EXPERT_FIGURES, np.stack(figures, axis=1), strict=True))
    return ExpertHistory(blocks, np.array(steps, float), by_name, *_columns(parts, columns))


def _add(parts: list[_Part], part: _Part, width: float) -> None:
    """Add ``part``, or merge it with the last part if both have at most ``width`` steps."""
    if parts and part.end - parts[-1].begin <= width:
        part = _Part(parts[-1].begin, part.end, parts.pop().tokens + part.tokens)
    parts.append(part)


def _columns(parts: list[_Part], most: int) -> tuple[Array, Array]:
    """Columns with equal numbers of steps: their edges, and the load in each, [columns, L, E]. Parts across an edge are divided."""
    ends = np.array([parts[0].begin, *(part.end for part in parts)])
    sums = np.cumsum([np.zeros_like(parts[0].tokens), *(part.tokens for part in parts)], axis=0)
    edges = np.linspace(ends[0], ends[-1], min(most, len(parts)) + 1)
    after = np.clip(np.searchsorted(ends, edges), 1, len(parts))
    share = ((edges - ends[after - 1]) / (ends[after] - ends[after - 1]))[:, None, None]
    counts = np.diff(sums[after - 1] + share * (sums[after] - sums[after - 1]), axis=0)
    load = counts / counts.mean(2, keepdims=True)
    load[load < ROUNDING] = 0
    return edges, load
