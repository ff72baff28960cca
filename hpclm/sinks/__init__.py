"""Sinks receive a run's metrics: W&B, MLflow, Trackio, or a user's class (log.sinks).

metrics.jsonl is the queue. For each sink, rank 0 starts a process (`worker`) that reads the queue and records its progress in the run
directory. Training never waits for a sink, and each row reaches a sink once, over all attempts of the run.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpclm.base import registry
from hpclm.config.monitoring import SINKS

Row = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True)
class RunInfo:
    """Information for a sink about the run."""

    id: str
    """The same for all attempts; it changes when the run goes back to an older checkpoint (``--from``)."""
    name: str
    """Name of the run directory."""
    project: str
    out: Path
    settings: Mapping[str, Any]
    """Dotted key -> value."""


class RefusedError(Exception):
    """The tracker answers, but refuses the rows and would refuse them again."""


class Sink(Protocol):
    """One run in an experiment tracker. Methods may raise at any time; the sink is then recreated and sent the same rows again.

    If `send` raises RefusedError for a row, the row is omitted. A sink may have `substitutes`, a mapping from names that its tracker
    refuses to their replacements. Each replacement is logged once.
    """

    def __init__(self, run: RunInfo) -> None:
        """Create the run ``run.id``, or continue it if an earlier attempt has created it."""

    def send(self, rows: Sequence[Row], before: int) -> None:
        """Add rows, in order, after the ``before`` rows already there; return once they are safe."""

    def close(self, code: int) -> None:
        """End the attempt with its exit code; after 85, the run will continue."""


def lookup(name: str) -> type[Sink]:
    """The class of the sink ``name``; ConfigError for unknown names or a missing library."""
    methods = registry.class_check("send", "close", made_with=["run"])
    kind: type[Sink] = registry.lookup("sink", name, SINKS, methods)
    return kind


def figures(row: Row) -> dict[str, float]:
    """The numbers of a row by name: `loss`, `validation_loss` or ``validation_loss/PART``, ``TASK/METRIC``, ..."""
    part = str(row.get("part", "valid")).removeprefix("valid").removeprefix("/")
    named = {key: value for key, value in row.items() if _is_figure(value) and key not in ("step", "time")}
    if part:
        named = {key if key == "samples" else f"{key}/{part}": value for key, value in named.items()}
    scores = row.get("tasks")
    if isinstance(scores, dict):
        for task, metrics in scores.items():
            named |= {f"{task}/{metric}": value for metric, value in metrics.items() if _is_figure(value)}
    return named


def _is_figure(value: object) -> bool:
    """Whether a value is a finite number that fits into 64 bits of floating point."""
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max  # type: ignore[operator]
