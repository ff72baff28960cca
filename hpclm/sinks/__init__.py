"""Where a run's metrics go besides its run directory: W&B, MLflow, Trackio, or a class of your own (log.sinks).

metrics.jsonl is the queue. For each sink rank 0 starts a process (``worker``) that reads it and remembers in the run directory
how far it has come (``position``). Training never waits for a sink, and a row reaches it once, over all attempts of the run.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpclm import registry
from hpclm.config.monitoring import SINKS

Row = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True)
class RunInfo:
    """What a sink knows about the run."""

    id: str
    """Shared by all attempts; a new one after the run has gone back to an older checkpoint (``--from``)."""
    name: str
    """That of the run directory."""
    project: str
    out: Path
    settings: Mapping[str, Any]
    """As section.name: value."""


class RefusedError(Exception):
    """A tracker was reached and refuses what it was sent; it would refuse the same again."""


class Sink(Protocol):
    """One run in an experiment tracker. It may raise at any time; it is then recreated and sent the same rows again.

    A row for which it raises RefusedError is left out instead. A sink may have ``substitutes``, a mapping of the names that its
    tracker refuses to those that it has instead; the log says them once.
    """

    def __init__(self, run: RunInfo) -> None:
        """Create the run ``run.id``, or continue it if an earlier attempt has created it."""

    def send(self, rows: Sequence[Row], before: int) -> None:
        """Add rows, in order, after the ``before`` that it has; return once they are safe."""

    def close(self, code: int) -> None:
        """The attempt ends with this exit code; 85: the run will continue."""


def lookup(name: str) -> type[Sink]:
    """The class of the sink ``name``; ConfigError if there is none, or if its library is missing."""
    methods = registry.class_check("send", "close", made_with=["run"])
    kind: type[Sink] = registry.lookup("sink", name, SINKS, methods)
    return kind


def figures(row: Row) -> dict[str, float]:
    """The numbers of a row by their names: ``loss``, ``validation_loss`` or ``validation_loss/PART``, ``TASK/METRIC``, ..."""
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
