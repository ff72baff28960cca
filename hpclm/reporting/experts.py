"""The load of experts over the steps of a run: its figures as curves, and how each layer's tokens were shared out as heat maps.

N lines of experts.jsonl, L layers with experts, E experts in each.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpclm.rundir.expert_figures import layer_figures
from hpclm.rundir.metric_names import EXPERT_FIGURES
from hpclm.rundir.rows import Row

Array = NDArray[np.float64]
COLUMNS = 120
"""Of a heat map, at most."""
CELLS = 400_000
"""Of all heat maps of a run, about, for which there may be fewer columns: a page must stay small."""
MIN_COLUMNS = 20
RANGE = 8.0
"""Times the mean at which the scale of colours ends, and below the mean at which it begins."""
LOADS = ("#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b")
"""Colours of loads of experts, from a RANGEth of the mean to RANGE times the mean."""
NO_TOKEN = "#d0009c"
"""Colour of an expert without a token."""
NOTHING = 1e-6
"""Times the mean that rounding may leave of no tokens."""
OVER_LAYERS: dict[str, Callable[..., Array]] = dict(zip(EXPERT_FIGURES, (np.max, np.min, np.sum), strict=True))
"""What stands for all layers, by the name of a figure."""


@dataclass(frozen=True, eq=False)
class ExpertHistory:
    """The load of a run's experts."""

    blocks: tuple[str, ...]
    """Names of the layers with experts."""
    steps: Array
    """[N]: the last step of each line."""
    figures: dict[str, Array]
    """[N, L], by the names EXPERT_FIGURES."""
    edges: Array
    """[columns + 1]: steps between which the columns of heat maps lie."""
    load: Array
    """[columns, L, E]: tokens of an expert, divided by those of the mean expert of its layer."""

    def percent(self, layer: int) -> NDArray[np.uint32]:
        """[E, columns]: the load as percentages; 0 only where there was no token."""
        # up, so that no token of an expert is rounded to none
        return np.ceil(100 * self.load[:, layer].T).astype(np.uint32)


@dataclass(frozen=True, eq=False)
class _Part:
    """The tokens of the steps past ``begin`` up to ``end``, [L, E]."""

    begin: float
    end: float
    tokens: Array


def expert_history(rows: Iterable[Row]) -> ExpertHistory | None:
    """The load of experts by the lines of experts.jsonl; None without any. Lines of another model, or out of order, are left out."""
    blocks: tuple[str, ...] = ()
    figures: list[Array] = []
    steps: list[float] = []
    parts: list[_Part] = []
    columns, width = 0, 0.0
    for row in rows:
        tokens = np.array([*row["tokens"].values()], float)
        if not blocks:
            blocks, columns = tuple(row["tokens"]), max(MIN_COLUMNS, min(COLUMNS, CELLS // tokens.size))
        if tuple(row["tokens"]) != blocks or (parts and tokens.shape != parts[0].tokens.shape):
            continue
        begin = parts[-1].end if parts else max(0.0, row["step"] - row["steps"])
        if row["step"] <= begin or not tokens.any(1).all():
            continue
        steps.append(row["step"])
        figures.append(layer_figures(tokens))
        parts = _added(parts, [_Part(begin, row["step"], tokens)], width)
        if len(parts) > 4 * columns:  # not all of a long run are kept
            width = (row["step"] - parts[0].begin) / columns
            parts = _added([], parts, width)
    if not parts:
        return None
    of_figures = dict(zip(EXPERT_FIGURES, np.stack(figures, axis=1), strict=True))
    return ExpertHistory(blocks, np.array(steps, float), of_figures, *_columns(parts, columns))


def _added(parts: list[_Part], more: list[_Part], width: float) -> list[_Part]:
    """``parts``, and ``more``, put together where that makes parts of at most ``width`` steps."""
    for part in more:
        last = parts[-1] if parts else part
        if parts and part.end - last.begin <= width:
            parts[-1] = _Part(last.begin, part.end, last.tokens + part.tokens)
        else:
            parts.append(part)
    return parts


def _columns(parts: list[_Part], most: int) -> tuple[Array, Array]:
    """Columns of equally many steps: their edges, and the load in each, [columns, L, E]; a part that lies in several is shared out."""
    ends = np.array([parts[0].begin, *(part.end for part in parts)])
    sums = np.cumsum([np.zeros_like(parts[0].tokens), *(part.tokens for part in parts)], axis=0)
    edges = np.linspace(ends[0], ends[-1], min(most, len(parts)) + 1)
    after = np.clip(np.searchsorted(ends, edges), 1, len(parts))
    share = ((edges - ends[after - 1]) / (ends[after] - ends[after - 1]))[:, None, None]
    counts = np.diff(sums[after - 1] + share * (sums[after] - sums[after - 1]), axis=0)
    load = counts / counts.mean(2, keepdims=True)
    load[load < NOTHING] = 0
    return edges, load
