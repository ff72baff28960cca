"""How the tokens of a run are shared out over its experts: metrics of each layer, experts.jsonl, and warnings.

L layers with experts, E experts in each.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.config import ModelConfig
from hpclm.config.experts import COEFFICIENTS
from hpclm.rundir import metric_names, metrics_file
from hpclm.rundir.expert_figures import layer_figures
from hpclm.side_path import SidePath

log = logging.getLogger(__name__)
INTERVALS = 5
"""Log intervals in a row, at least, after which an expert without a token is called dead, or one has taken over."""
TOKENS = 1000
"""Tokens that the mean expert of the layer has had in that time, at least: fewer say little."""
TAKEN_OVER = 5.0
"""Times the mean that one expert must have; less where even all tokens would not be that many."""
RESOLUTION = 1000
"""A line of experts.jsonl covers at least the steps so far divided by this, so that the file grows by their logarithm."""
LAYERS_NAMED = 8
"""Layers that a message names, at most."""
Counts = NDArray[np.float64]


class Streak:
    """For how long something has held of each expert, without a break."""

    def __init__(self, shape: tuple[int, int]):
        self._intervals, self._steps, self._tokens = (np.zeros(shape) for _ in range(3))
        self._named = set[int]()
        """Rows of layers that a warning has named."""

    def add(self, holds: NDArray[np.bool_], steps: int, mean: Counts) -> None:
        """An interval of ``steps`` steps. ``holds``: [L, E]. ``mean``: [L, 1] tokens of the mean expert."""
        for length, added in ((self._intervals, 1), (self._steps, steps), (self._tokens, mean)):
            length[:] = np.where(holds, length + added, 0)

    @property
    def long(self) -> NDArray[np.bool_]:
        """[L, E]: whether it has held for long enough to say so."""
        long: NDArray[np.bool_] = (self._intervals >= INTERVALS) & (self._tokens >= TOKENS)
        return long

    def steps(self, row: int) -> int:
        """Steps for which it has held of all experts of a layer of which it has held for long."""
        return int(self._steps[row][self.long[row]].min())

    def rows(self) -> list[int]:
        """Layers of which it has held for long."""
        return [int(row) for row in np.flatnonzero(self.long.any(1))]

    def new_rows(self) -> list[int]:
        """Those of them that this has not returned before."""
        new = [row for row in self.rows() if row not in self._named]
        self._named |= {*new}
        return new


class ExpertLoad:
    """Adds up the tokens of each expert over the steps of a log interval, and over those of a line of experts.jsonl."""

    def __init__(self, out: Path, config: ModelConfig):
        self.config = config
        self.blocks = [f"block{layer}" for layer in range(config.layers) if config.has_experts(layer)]
        shape = len(self.blocks), config.experts
        self._counts, self._steps = np.zeros(shape), 0
        """Since the last log line."""
        self._line_counts, self._line_steps = np.zeros(shape, np.int64), 0
        """Since the last line of experts.jsonl."""
        self._dead, self._taken_over = Streak(shape), Streak(shape)
        self._load = np.ones(shape)
        self._file = metrics_file.expert_tokens(out)
        self._writing = SidePath(f"{self._file.path} cannot be written")

    def step(self, counts: Counts | None) -> None:
        """The tokens of a step, [L * E]; None for one that was skipped."""
        self._steps += 1
        self._line_steps += 1
        if counts is not None:
            self._counts += counts.reshape(self._counts.shape)

    def logged(self, row: dict[str, Any], last: bool) -> dict[str, float]:
        """At a log line: the figures of each layer over the steps since the last one. ``row``: of the step in metrics.jsonl. ``last``:
        whether it is the run's."""
        counts, steps = self._counts, self._steps
        self._counts, self._steps = np.zeros_like(counts), 0
        self._line_counts += counts.astype(np.int64)
        if last or self._line_steps >= row["step"] / RESOLUTION:
            self._write(row)
        mean = counts.mean(1, keepdims=True)
        if not mean.all():  # no token counted
            return {}
        self._load = counts / mean
        self._dead.add(counts == 0, steps, mean)
        self._taken_over.add(self._load >= self._limit(), steps, mean)
        self._warn()
        largest, entropy, dead = layer_figures(counts).tolist()
        figures = dict(zip(metric_names.EXPERT_FIGURES, (largest, entropy, map(int, dead)), strict=True))
        return {
            f"{name}/{block}": value
            for name, of in figures.items()
            for block, value in zip(self.blocks, of, strict=True)
        }

    def problems(self) -> str:
        """What is wrong now, in one line; empty if nothing is."""
        parts = [*self._dead_layers(self._dead.rows()), *self._crowded_layers(self._taken_over.rows())]
        return _listed(parts)

    def close(self) -> None:
        """Close the file."""
        self._writing.attempt(self._file.close, now=True)

    def _limit(self) -> float:
        """Times the mean from which on one expert takes over: three quarters of all tokens at most."""
        return max(2.0, min(TAKEN_OVER, 0.75 * self.config.experts / self.config.experts_per_token))

    def _write(self, row: dict[str, Any]) -> None:
        if self._line_counts.any():
            tokens = dict(zip(self.blocks, self._line_counts.tolist(), strict=True))
            line = {"step": row["step"], "steps": self._line_steps, "time": row["time"], "tokens": tokens}
            self._writing.attempt(lambda: self._file.write(json.dumps(line) + "\n"), now=True)
        self._line_counts, self._line_steps = np.zeros_like(self._line_counts), 0

    def _warn(self) -> None:
        """Warn of layers of which no warning has said so."""
        if parts := [*self._dead_layers(self._dead.new_rows())]:
            log.warning("%s. %s", _listed(parts), self._way_out())
        if parts := [*self._crowded_layers(self._taken_over.new_rows())]:
            log.warning("%s. %s", _listed(parts), self._way_out())

    def _dead_layers(self, rows: list[int]) -> Iterator[str]:
        for row in rows:
            dead = int(self._dead.long[row].sum())
            yield f"{self.blocks[row]}: {dead} of {self.config.experts} experts got no token in the last {self._dead.steps(row)} steps"

    def _crowded_layers(self, rows: list[int]) -> Iterator[str]:
        for row in rows:
            expert = int(np.where(self._taken_over.long[row], self._load[row], 0.0).argmax())
            times, steps = self._load[row, expert], self._taken_over.steps(row)
            yield f"{self.blocks[row]}: expert {expert} takes {times:.1f} times the mean expert's tokens, for {steps} steps now"

    def _way_out(self) -> str:
        used = [
            f"model.{name}={getattr(self.config, name):g}" for name in COEFFICIENTS[:-1] if getattr(self.config, name)
        ]
        ways = "model.balance_sequence=0.01, or model.router_choice_bias=true with model.balance_bias=0.001"
        way = f"A larger {' or '.join(used)} balances them more" if used else f"Nothing balances them: set {ways}"
        return f"{way}; so may a lower optim.lr. hpclm report shows the load of every expert"


def _listed(parts: list[str]) -> str:
    more = len(parts) - LAYERS_NAMED
    return "; ".join(parts[:LAYERS_NAMED]) + (f"; and {more} more layers" if more > 0 else "")
