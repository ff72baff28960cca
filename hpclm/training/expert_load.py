"""The load of the experts, in tokens: metrics of each layer, and experts.jsonl.

L layers with experts, E experts in each.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.base import metric_names
from hpclm.base.side_path import SidePath
from hpclm.config import ModelConfig
from hpclm.rundir import metrics_file
from hpclm.rundir.expert_figures import layer_figures

RESOLUTION = 1000
"""A line of experts.jsonl covers at least the steps so far divided by this, so that the file grows with their logarithm."""
Counts = NDArray[np.float64]


class ExpertLoad:
    """Sums the tokens of each expert over a log interval, and over a line of experts.jsonl."""

    def __init__(self, out: Path, config: ModelConfig, may_write: Callable[[], bool]):
        """``may_write``: whether this process still holds the run directory."""
        self.blocks = [f"block{number}" for number, layer in enumerate(config.blocks) if layer.experts]
        shape = len(self.blocks), config.experts.count
        self._counts = np.zeros(shape)  # tokens since the last log line
        self._line_counts = np.zeros(shape, np.int64)  # tokens since the last line of experts.jsonl, as are the steps
        self._line_steps = 0
        self._file = metrics_file.expert_tokens(out, may_write)
        self._writing = SidePath(f"{self._file.path} cannot be written")

    def step(self, counts: Counts | None) -> None:
        """Add the tokens of a step, [L * E]; None for a skipped step."""
        self._line_steps += 1
        if counts is not None:
            self._counts += counts.reshape(self._counts.shape)

    def logged(self, row: dict[str, Any], last: bool) -> dict[str, float]:
        """Close a log interval; returns its metrics by layer. ``row``: the step's row of metrics.jsonl. ``last``: the run's last step."""
        counts = self._counts
        self._counts = np.zeros_like(counts)
        self._line_counts += counts.astype(np.int64)
        if last or self._line_steps >= row["step"] / RESOLUTION:
            self._write(row)
        if not counts.any(1).all():  # no token counted
            return {}
        largest, entropy, dead = layer_figures(counts).tolist()
        figures = dict(zip(metric_names.EXPERT_FIGURES, (largest, entropy, map(int, dead)), strict=True))
        return {
            f"{name}/{block}": value
            for name, by_layer in figures.items()
            for block, value in zip(self.blocks, by_layer, strict=True)
        }

    def close(self) -> None:
        """Close experts.jsonl after a last attempt to write."""
        self._writing.attempt(self._file.close, now=True)

    def _write(self, row: dict[str, Any]) -> None:
        if self._line_counts.any():
            tokens = dict(zip(self.blocks, self._line_counts.tolist(), strict=True))
            line = {"step": row["step"], "steps": self._line_steps, "time": row["time"], "tokens": tokens}
            self._writing.attempt(lambda: self._file.write(json.dumps(line) + "\n"), now=True)
        self._line_counts = np.zeros_like(self._line_counts)
        self._line_steps = 0
