"""The load of the experts, in tokens: metrics of each layer, experts.jsonl, and warnings.

L layers with experts, E experts in each.
"""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.base import metric_names
from hpclm.base.side_path import SidePath
from hpclm.config import ModelConfig
from hpclm.config.checks import value_at
from hpclm.config.experts import COEFFICIENTS
from hpclm.rundir import metrics_file
from hpclm.rundir.expert_figures import layer_figures

log = logging.getLogger(__name__)
INTERVALS = 5  # log intervals in a row until an expert counts as dead or dominating
TOKENS = 1000  # tokens that the mean expert of the layer must have had in that time
DOMINATES = 5.0  # load, as a multiple of the mean, above which one expert dominates
RESOLUTION = 1000
"""A line of experts.jsonl covers at least the steps so far divided by this, so that the file grows with their logarithm."""
LAYERS_NAMED = 8  # at most, in a message
Counts = NDArray[np.float64]


class Streak:
    """How long a condition has held for each expert without a break."""

    def __init__(self, shape: tuple[int, int]):
        self._intervals = np.zeros(shape)
        self._steps = np.zeros(shape)
        self._tokens = np.zeros(shape)
        self._named = set[int]()  # layers that ``new_rows`` has returned

    def add(self, holds: NDArray[np.bool_], steps: int, mean: Counts) -> None:
        """Add an interval of ``steps`` steps. ``holds``: [L, E]. ``mean``: [L, 1] tokens of the mean expert."""
        self._intervals = np.where(holds, self._intervals + 1, 0)
        self._steps = np.where(holds, self._steps + steps, 0)
        self._tokens = np.where(holds, self._tokens + mean, 0)

    @property
    def long(self) -> NDArray[np.bool_]:
        """[L, E]: True if the condition has held long enough to report."""
        long: NDArray[np.bool_] = (self._intervals >= INTERVALS) & (self._tokens >= TOKENS)
        return long

    def steps(self, row: int) -> int:
        """Number of steps in which the condition has held for all the ``long`` experts of a layer."""
        return int(self._steps[row][self.long[row]].min())

    def rows(self) -> list[int]:
        """Layers with a ``long`` expert."""
        return [int(row) for row in np.flatnonzero(self.long.any(1))]

    def new_rows(self) -> list[int]:
        """The ``rows`` that were not returned before."""
        new = [row for row in self.rows() if row not in self._named]
        self._named |= {*new}
        return new


class ExpertLoad:
    """Sums the tokens of each expert over a log interval, and over a line of experts.jsonl."""

    def __init__(self, out: Path, config: ModelConfig, may_write: Callable[[], bool]):
        """``may_write``: whether this process still holds the run directory."""
        self.config = config
        self.blocks = [f"block{number}" for number, layer in enumerate(config.blocks) if layer.experts]
        shape = len(self.blocks), config.experts.count
        self._counts = np.zeros(shape)  # tokens since the last log line, as are the steps
        self._steps = 0
        self._line_counts = np.zeros(shape, np.int64)  # tokens since the last line of experts.jsonl, as are the steps
        self._line_steps = 0
        self._dead = Streak(shape)
        self._dominating = Streak(shape)
        self._load = np.ones(shape)  # tokens of the last log interval, as a multiple of the layer's mean
        self._file = metrics_file.expert_tokens(out, may_write)
        self._writing = SidePath(f"{self._file.path} cannot be written")

    def step(self, counts: Counts | None) -> None:
        """Add the tokens of a step, [L * E]; None for a skipped step."""
        self._steps += 1
        self._line_steps += 1
        if counts is not None:
            self._counts += counts.reshape(self._counts.shape)

    def logged(self, row: dict[str, Any], last: bool) -> dict[str, float]:
        """Close a log interval; returns its metrics by layer. ``row``: the step's row of metrics.jsonl. ``last``: the run's last step."""
        counts = self._counts
        steps = self._steps
        self._counts = np.zeros_like(counts)
        self._steps = 0
        self._line_counts += counts.astype(np.int64)
        if last or self._line_steps >= row["step"] / RESOLUTION:
            self._write(row)
        mean = counts.mean(1, keepdims=True)
        if not mean.all():  # no token counted
            return {}
        self._load = counts / mean
        self._dead.add(counts == 0, steps, mean)
        self._dominating.add(self._load >= self._limit(), steps, mean)
        self._warn()
        largest, entropy, dead = layer_figures(counts).tolist()
        figures = dict(zip(metric_names.EXPERT_FIGURES, (largest, entropy, map(int, dead)), strict=True))
        return {
            f"{name}/{block}": value
            for name, by_layer in figures.items()
            for block, value in zip(self.blocks, by_layer, strict=True)
        }

    def problems(self) -> str:
        """Present problems in one line; empty without any."""
        return _listed([*self._dead_layers(self._dead.rows()), *self._dominated_layers(self._dominating.rows())])

    def close(self) -> None:
        """Close experts.jsonl after a last attempt to write."""
        self._writing.attempt(self._file.close, now=True)

    def _limit(self) -> float:
        """Load, as a multiple of the mean, above which one expert dominates: at most three quarters of all tokens."""
        return max(2.0, min(DOMINATES, 0.75 * self.config.experts.count / self.config.experts.per_token))

    def _write(self, row: dict[str, Any]) -> None:
        if self._line_counts.any():
            tokens = dict(zip(self.blocks, self._line_counts.tolist(), strict=True))
            line = {"step": row["step"], "steps": self._line_steps, "time": row["time"], "tokens": tokens}
            self._writing.attempt(lambda: self._file.write(json.dumps(line) + "\n"), now=True)
        self._line_counts = np.zeros_like(self._line_counts)
        self._line_steps = 0

    def _warn(self) -> None:
        """Warn once about each layer with dead experts, and each layer that one expert dominates."""
        dead = [*self._dead_layers(self._dead.new_rows())]
        dominated = [*self._dominated_layers(self._dominating.new_rows())]
        for parts in (dead, dominated):
            if parts:
                log.warning("%s. %s", _listed(parts), self._way_out())

    def _dead_layers(self, rows: list[int]) -> Iterator[str]:
        for row in rows:
            dead = int(self._dead.long[row].sum())
            yield f"{self.blocks[row]}: {dead} of {self.config.experts.count} experts got no token in the last {self._dead.steps(row)} steps"

    def _dominated_layers(self, rows: list[int]) -> Iterator[str]:
        for row in rows:
            expert = int(np.where(self._dominating.long[row], self._load[row], 0.0).argmax())
            times, steps = self._load[row, expert], self._dominating.steps(row)
            yield f"{self.blocks[row]}: expert {expert} takes {times:.1f} times the mean expert's tokens, for {steps} steps now"

    def _way_out(self) -> str:
        values = {name: value_at(self.config, name) for name in COEFFICIENTS[:-1]}
        used = [f"model.{name}={value:g}" for name, value in values.items() if value]
        way = f"A larger {' or '.join(used)} balances them more"
        if not used:
            settings = "model.experts.balance_sequence=0.01, or model.experts.router_choice_bias=true with model.experts.balance_bias=0.001"
            way = f"Nothing balances them: set {settings}"
        return f"{way}; so may a lower optim.lr. hpclm report shows the load of every expert"


def _listed(parts: list[str]) -> str:
    more = len(parts) - LAYERS_NAMED
    text = "; ".join(parts[:LAYERS_NAMED])
    if more > 0:
        text += f"; and {more} more layers"
    return text
