"""Where a run's metrics go besides its run directory: W&B, MLflow, Trackio, or a user's class (log.sinks).

metrics.jsonl is the queue. For each sink rank 0 starts a process (`worker`) that reads it and records its progress in the run
directory (`position`). Training never waits for a sink, and a row reaches it once, over all attempts of the run.
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
    """Shared by all attempts; a new one after the run has gone back to an older checkpoint (``--from``)."""
    name: str
    """Name of the run directory."""
    project: str
    out: Path
    settings: Mapping[str, Any]
    """As section.name: value."""


class RefusedError(Exception):
    """The tracker was reached and refuses the rows; it would refuse the same rows again."""


class Sink(Protocol):
    """One run in an experiment tracker. Methods may raise at any time; the sink is then recreated and sent the same rows again.

    A row for which it raises RefusedError is omitted instead. A sink may have `substitutes`, a mapping from names that its tracker
    refuses to their replacements, which are logged once.
    """

    def __init__(self, run: RunInfo) -> None:
        """Create the run ``run.id``, or continue it if an earlier attempt has created it."""

    def send(self, rows: Sequence[Row], before: int) -> None:
        """Add rows, in order, after the ``before`` rows already there; return once they are safe."""

    def close(self, code: int) -> None:
        """The attempt ends with this exit code; 85: the run will continue."""


def lookup(name: str) -> type[Sink]:
    """The class of the sink ``name``; ConfigError for unknown names or a missing library."""
    methods = registry.class_check("send", "close", made_with=["run"])
    kind: type[Sink] = registry.lookup("sink", name, SINKS, methods)
    return kind


def figures(row: Row) -> dict[str, float]:
    """The numbers of a row by their names: `loss`, `validation_loss` or ``validation_loss/PART``, ``TASK/METRIC``, ..."""
    part = str(row.get("part", "valid")).removeprefix("valid").removeprefix("/")
    ending = f"/{part}" if part else ""
    numbers = {key: value for key, value in row.items() if _is_figure(value) and key not in ("step", "time")}
    named = {key if key == "samples" else key + ending: value for key, value in numbers.items()}
    scores = row.get("tasks")
    for task, metrics in scores.items() if isinstance(scores, dict) else ():
        named |= {f"{task}/{metric}": value for metric, value in metrics.items() if _is_figure(value)}
    return named


def _is_figure(value: object) -> bool:
    """Whether a value is a finite number that fits into 64 bits of floating point."""
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max  # type: ignore[operator]
