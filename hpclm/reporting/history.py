"""The history of a run, from its events.jsonl, metrics.jsonl, metrics.lost.jsonl and experts.jsonl. Unreadable files are left out."""

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpclm.base import metric_names
from hpclm.base.errors import MACHINE, unread
from hpclm.reporting.attempts import AttemptReport, Signs, attempts
from hpclm.reporting.expert_history import ExpertHistory, expert_history
from hpclm.rundir import events, metrics_file
from hpclm.rundir.branches import Trunk, trunk_of
from hpclm.rundir.rows import Row, fits

log = logging.getLogger(__name__)
FIGURES = {
    **metrics_file.STEP,
    **dict.fromkeys(("memory", "mfu", "data_seconds", "data_fraction"), float),
    **dict.fromkeys(("validation_loss_ema", "validation_perplexity", "validation_bits_per_byte"), float),
}
"""Field of the recent rows -> its type."""
COLUMNS = ("step", "time", "loss", "grad_norm", "lr", "tokens_per_second", "step_seconds")
"""The fields that a history keeps of every step."""
EVALUATION = ("validation_loss", "validation_loss_ema", "validation_bits_per_byte", "part", "tasks")
"""The fields of rows that are not steps."""
RECENT = 50  # the number of recent rows
Array = NDArray[np.float64]
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class StepTable:
    """Figures of N steps as columns; as rows, millions of steps would take gigabytes."""

    columns: Mapping[str, Array]
    """[N] for each of COLUMNS and each metric that the user's code reports; NaN where a number is not finite or unknown."""

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepTable):
            return False
        return all(np.array_equal(self[name], other[name], equal_nan=True) for name in COLUMNS)

    @property
    def reported(self) -> list[str]:
        """The names of the metrics that the user's code reports."""
        return [name for name in self.columns if name not in COLUMNS]

    def taken(self, places: NDArray[Any]) -> "StepTable":
        """The rows at these places."""
        return StepTable({name: column[places] for name, column in self.columns.items()})

    def last_of_each(self) -> "StepTable":
        """The last row of each step, at the place of the step's first row."""
        steps = self["step"]
        if (np.diff(steps) > 0).all():
            return self
        first = np.unique(steps, return_index=True)[1]
        last = len(steps) - 1 - np.unique(steps[::-1], return_index=True)[1]
        return self.taken(last[np.argsort(first)])

    def signs(self) -> Signs:
        """The steps as signs of life."""
        return Signs.sorted(self["time"], self["step"], self["step_seconds"])


@dataclass(frozen=True)
class History:
    """All known facts about a run over time."""

    out: Path
    attempts: tuple[AttemptReport, ...]
    steps: StepTable
    """The steps that count, in order."""
    evaluations: tuple[Row, ...]
    lost: StepTable
    """The steps that were redone."""
    recent: tuple[Row, ...] = ()
    """The rows of the last RECENT steps."""
    memory: float = 0.0
    """Peak memory of rank 0, in bytes; 0 if unknown."""
    tasks: tuple[Row, ...] = ()
    """Scores on tasks, from hpclm evaluate."""
    experts: ExpertHistory | None = field(default=None, compare=False)
    """The load of its experts; None without experts."""
    state: str = ""
    """The state at the end of the last attempt; empty if unknown."""
    phases: tuple[Row, ...] = ()
    """The rows that say how much has been read of each dataset; only with data.order=per_dataset."""
    trunk: Trunk | None = None
    """The run that it goes on from; None if it is not a branch."""

    @property
    def wall(self) -> float:
        """Seconds from the first submission, or start, to the last sign of life."""
        if not self.attempts:
            return 0.0
        return self.attempts[-1].end - self.attempts[0].begin

    @property
    def goodput(self) -> float | None:
        """The fraction of the wall time in training steps that count; None without wall time."""
        kept = float(np.nansum(self.steps["step_seconds"]))
        return min(1.0, kept / self.wall) if self.wall > 0 else None

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the recent rows; None if no row has it."""
        values = [row[name] for row in self.recent if row.get(name) is not None]
        return sum(values) / len(values) if values else None

    def seconds(self, kind: str) -> float:
        """Seconds of all attempts in phases of this kind."""
        return sum(attempt.seconds(kind) for attempt in self.attempts)


def read_history(out: Path) -> History:
    """The history of the run in ``out``; HpclmError if the disk fails."""
    recent = [row for row in metrics_file.last(out, FIGURES) if "loss" in row][-RECENT:]
    own = [name for row in recent for name, value in row.items() if metric_names.is_users(name, value)]
    kept = _MetricsReader((*COLUMNS, *list(dict.fromkeys(own))[: metric_names.CURVES]))
    lost = _MetricsReader(COLUMNS)
    _if_readable(lambda: kept.read(out))
    _if_readable(lambda: lost.read(out, lost=True))
    steps = kept.steps()
    redone = lost.steps()
    stamps = np.stack([redone["step"], redone["time"]], axis=1)  # a kill may have repeated rows
    redone = redone.taken(np.sort(np.unique(stamps, axis=0, return_index=True)[1]))
    times = np.array([float(row.get("time") or 0) for row in (*kept.others, *lost.others)])
    unknown = np.full(len(times), np.nan)
    happened = _if_readable(lambda: events.read_events(out)) or []
    return History(
        out,
        tuple(attempts(happened, [steps.signs(), redone.signs(), Signs.sorted(times, unknown, unknown)])),
        steps.last_of_each(),
        tuple(row for row in kept.others if "validation_loss" in row),
        redone,
        tuple(recent),
        kept.memory,
        tuple(row for row in kept.others if "tasks" in row),
        _if_readable(lambda: expert_history(metrics_file.stream_expert_tokens(out))),
        events.state_of(events.last_end(happened)),
        tuple(kept.phases),
        trunk_of(happened),
    )


def by_step(out: Path) -> list[dict[str, Any]]:
    """The last row of each step and all other rows of metrics.jsonl, in the order of steps; OSError if reading fails."""
    steps: dict[int, dict[str, Any]] = {}
    evaluations = []
    scores = []
    with suppress(FileNotFoundError):
        for row in metrics_file.stream(out, FIGURES):
            if "loss" in row:
                steps[row["step"]] = row
            elif "validation_loss" in row:
                evaluations.append(row)
            elif "tasks" in row:
                scores.append(row)
    return sorted([*steps.values(), *evaluations, *scores], key=itemgetter("step"))


class _MetricsReader:
    """Reads a file of metrics: steps into columns, other rows unchanged."""

    def __init__(self, names: Sequence[str]) -> None:
        """``names``: the fields of steps to keep."""
        self.others = list[Row]()
        self.phases = list[Row]()
        self.memory = 0.0
        self._columns = {name: array("d") for name in names}

    def read(self, out: Path, lost: bool = False) -> None:
        """Read metrics.jsonl of the run in ``out``, or, with ``lost``, the file of its lost steps; OSError if reading fails."""
        names = ("step", *EVALUATION)
        for block in metrics_file.blocks(out, {name: FIGURES[name] for name in names}, lost):
            steps = [row for row in block.rows if "loss" in row]
            self.phases += [row for row in steps if type(row.get("phase")) is int]
            if len(steps) < len(block.rows):
                self.others += [row for row in block.rows if "loss" not in row]
            try:
                for name, column in self._columns.items():
                    column.frombytes(_numbers(steps, name).tobytes())
                self.memory = float(np.fmax.reduce(_numbers(steps, "memory"), initial=self.memory))
            except (ValueError, TypeError, OverflowError):
                for _ in metrics_file.blocks(out, {**dict.fromkeys(self._columns, float), **FIGURES}, lost):
                    pass  # raises an error that names the line
                raise

    def steps(self) -> StepTable:
        """The steps read so far."""
        return StepTable({name: np.frombuffer(column) for name, column in self._columns.items()})


def _numbers(rows: Sequence[Row], name: str) -> Array:
    """A field of these rows; NaN for null or absent values. An invalid value raises an error.

    ``metrics_file.blocks`` could check the fields too, but would take twice as long.
    """
    try:
        values = list(map(itemgetter(name), rows))
    except KeyError:
        values = [row.get(name) for row in rows]
    numbers = np.array(values, np.float64)
    largest = np.fmax.reduce(np.abs(numbers), initial=0.0)
    if not {*map(type, values)} <= {int, float, NoneType} or not fits(float(largest), float):
        raise ValueError(name)
    return numbers


def _if_readable(read: Callable[[], Result]) -> Result | None:
    """The result of ``read``; None if its file is missing, or, with a warning, cannot be read. HpclmError if the disk fails."""
    try:
        return read()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in MACHINE:
            raise unread(error, error.filename, "") from error
        log.warning("%s is left out: %s", error.filename, error.strerror)
        return None
