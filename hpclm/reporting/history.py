"""What became of a run's attempts: when each was queued, started and trained, what it lost, and what ended it.

Everything is read from the run directory: events.jsonl, metrics.jsonl and metrics.lost.jsonl. What they do not say is left out.
"""

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpclm.errors import MACHINE, ExitCode, unread
from hpclm.reporting.experts import ExpertHistory, expert_history
from hpclm.rundir import events, metric_names, metrics_file, summary
from hpclm.rundir.state import moment

log = logging.getLogger(__name__)
LATEST = 1 << 36  # seconds since 1970 that are a time
RESTARTED = "why the last one ended: "
FIGURES = {
    **metrics_file.STEP,
    **dict.fromkeys(("memory", "mfu", "data_seconds", "data_fraction", "validation_perplexity"), float),
}
EVALUATION = ("validation_loss", "part", "tasks")
ENDINGS: Mapping[int, str] = {
    ExitCode.DONE: "finished",
    ExitCode.REQUEUE: "preempted; saved, will be requeued",
    ExitCode.DIVERGED: "diverged",
}
KINDS = ("queued", "starting", "training", "lost")
COLUMNS = ("step", "time", "loss", "grad_norm", "lr", "tokens_per_second", "step_seconds")
"""Figures that a history has of every step."""
RECENT = 50  # steps of which it has all of FIGURES
Row = Mapping[str, Any]
Content = TypeVar("Content")


@dataclass(frozen=True, eq=False)
class StepTable:
    """Figures of N steps, as columns: millions of rows would take gigabytes."""

    columns: Mapping[str, NDArray[np.float64]]
    """Of each of COLUMNS, and of what the user's code reports, [N]; NaN where a number was not finite, or is not known."""

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return self.columns[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepTable) and all(
            np.array_equal(self[name], other[name], equal_nan=True) for name in COLUMNS
        )

    @property
    def reported(self) -> list[str]:
        """Names of what the user's code reports."""
        return [name for name in self.columns if name not in COLUMNS]

    def taken(self, places: NDArray[Any]) -> "StepTable":
        """The rows at these places, or where a mask is true."""
        return StepTable({name: column[places] for name, column in self.columns.items()})


@dataclass(frozen=True)
class Phase:
    """A part of an attempt; times are seconds since 1970."""

    kind: str
    """One of KINDS."""
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass(frozen=True)
class Attempt:
    """One start of a run."""

    number: int
    row: Row
    """The event of its beginning."""
    phases: tuple[Phase, ...]
    """In order, without overlaps."""
    first: int
    """The step it resumed from."""
    last: int
    """The last step it did."""
    saved: int
    """The last step of it that another attempt, or nothing yet, resumes from."""
    ended: str
    """What ended it; empty while it may still run."""
    code: int | None = None
    """Its exit code, if it exited cleanly."""

    @property
    def begin(self) -> float:
        """When it was queued, or began."""
        return self.phases[0].begin

    @property
    def end(self) -> float:
        """Its last sign of life."""
        return self.phases[-1].end

    @property
    def lost(self) -> int:
        """Steps that had to be done again."""
        return max(0, self.last - self.saved)

    def seconds(self, kind: str) -> float:
        """Time in the phases of this kind."""
        return sum(phase.seconds for phase in self.phases if phase.kind == kind)


@dataclass(frozen=True)
class History:
    """All of a run."""

    out: Path
    attempts: tuple[Attempt, ...]
    steps: StepTable
    """The steps that count, in order."""
    evaluations: tuple[Row, ...]
    lost: StepTable
    """Steps that were done again."""
    recent: tuple[Row, ...] = ()
    """Rows of the last RECENT steps."""
    memory: float = 0.0
    """Peak memory of rank 0, in bytes; 0 if unknown."""
    tasks: tuple[Row, ...] = ()
    """Scores at tasks (evaluate.tasks)."""
    experts: ExpertHistory | None = field(default=None, compare=False)
    """The load of its experts; None if it has none."""
    state: str = ""
    """The state in which its last start ended; empty if its files do not say."""

    @property
    def wall(self) -> float:
        """Seconds from the first submission, or start, to the last sign of life."""
        return self.attempts[-1].end - self.attempts[0].begin if self.attempts else 0.0

    @property
    def goodput(self) -> float | None:
        """The part of the wall time that went into training steps that count."""
        kept = float(np.nansum(self.steps["step_seconds"]))
        return min(1.0, kept / self.wall) if self.wall > 0 else None

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the last RECENT steps; None if none of them has it."""
        values = [row[name] for row in self.recent if row.get(name) is not None]
        return sum(values) / len(values) if values else None

    def seconds(self, kind: str) -> float:
        """Time of all attempts in the phases of this kind."""
        return sum(attempt.seconds(kind) for attempt in self.attempts)


def read(out: Path) -> History:
    """The history of the run in ``out``; HpclmError if the disk fails."""
    recent = tuple(row for row in metrics_file.last(out, FIGURES) if "loss" in row)[-RECENT:]
    names = dict.fromkeys(name for row in recent for name, value in row.items() if metric_names.is_users(name, value))
    kept, lost = _MetricsReader((*COLUMNS, *list(names)[: metric_names.CURVES])), _MetricsReader()
    _known(lambda: kept.read(out))
    _known(lambda: lost.read(out, lost=True))
    happened, redone = _known(lambda: events.read(out)) or [], lost.steps()
    stamps = np.stack([redone["step"], redone["time"]], axis=1)  # a kill may have repeated them
    redone = redone.taken(np.sort(np.unique(stamps, axis=0, return_index=True)[1]))
    return History(
        out,
        tuple(_attempts(happened, _signs(kept.steps(), redone, [*kept.others, *lost.others]))),
        _last_of_each(kept.steps()),
        tuple(row for row in kept.others if "validation_loss" in row),
        redone,
        recent,
        kept.memory,
        tuple(row for row in kept.others if "tasks" in row),
        _known(lambda: expert_history(metrics_file.stream_expert_tokens(out))),
        events.last_end(happened).get("state") or "",
    )


def by_step(out: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in the order of steps, the last one of each step; OSError if the file cannot be read."""
    steps: dict[int, dict[str, Any]] = {}
    others = []
    with suppress(FileNotFoundError):
        for row in metrics_file.stream(out, FIGURES):
            if "loss" in row:
                steps[row["step"]] = row
            elif "validation_loss" in row or "tasks" in row:
                others.append(row)
    others.sort(key=lambda row: "tasks" in row)
    return sorted([*steps.values(), *others], key=lambda row: int(row["step"]))


class _MetricsReader:
    """Reads a file of metrics: steps as columns, the other rows as they are."""

    def __init__(self, names: Sequence[str] = COLUMNS) -> None:
        """``names``: the figures of steps to keep."""
        self.columns = {name: array("d") for name in names}
        self.others = list[Row]()
        self.memory = 0.0

    def read(self, out: Path, lost: bool = False) -> None:
        """Read metrics.jsonl of the run in ``out``, or with ``lost`` the file of its lost steps; OSError if that fails."""
        names = (*self.columns, "memory", *EVALUATION)
        for block in metrics_file.blocks(out, {name: FIGURES.get(name, float) for name in names}, lost):
            steps = [row for row in block.rows if "loss" in row]
            if len(steps) < len(block.rows):
                self.others += [row for row in block.rows if "loss" not in row]
            for name, column in self.columns.items():
                column.frombytes(_numbers(steps, name).tobytes())
            self.memory = float(np.fmax.reduce(_numbers(steps, "memory"), initial=self.memory))

    def steps(self) -> StepTable:
        """The steps read so far."""
        return StepTable({name: np.frombuffer(column) for name, column in self.columns.items()})


def _numbers(rows: Sequence[Row], name: str) -> NDArray[np.float64]:
    """A field of these rows; NaN where it is null or absent."""
    try:
        return np.fromiter(map(itemgetter(name), rows), np.float64, len(rows))
    except (KeyError, TypeError):
        return np.array([row.get(name) for row in rows], np.float64)


@dataclass(frozen=True)
class _Signs:
    """Signs of life in the order of their times."""

    times: NDArray[np.float64]
    steps: NDArray[np.float64]
    """NaN for what is no step."""
    seconds: NDArray[np.float64]
    """What each step took; NaN if unknown."""

    @classmethod
    def of(cls, times: NDArray[Any], steps: NDArray[Any], seconds: NDArray[Any]) -> "_Signs":
        """Those that have a time, in order."""
        if len(times) and times[0] > 0 and times[-1] < LATEST and (np.diff(times) >= 0).all():
            return cls(times, steps, seconds)  # as is: copies of millions would take much memory
        order = np.argsort(times, kind="stable")
        order = order[(times[order] > 0) & (times[order] < LATEST)]
        return cls(times[order], steps[order], seconds[order])

    def between(self, begin: float, end: float) -> "_Signs":
        """Those from ``begin`` to before ``end``."""
        part = slice(*np.searchsorted(self.times, [begin, end]))
        return _Signs(self.times[part], self.steps[part], self.seconds[part])

    def first_after(self, step: float, otherwise: float) -> float:
        """When the first step past ``step`` began; ``otherwise`` without one."""
        begins = (self.times - np.nan_to_num(self.seconds))[self.steps > step]
        return float(begins.min(initial=otherwise))


def _signs(kept: StepTable, lost: StepTable, others: list[Row]) -> list[_Signs]:
    beside, none = np.array([float(row.get("time") or 0) for row in others]), np.full(len(others), np.nan)
    measured = (_Signs.of(table["time"], table["step"], table["step_seconds"]) for table in (kept, lost))
    return [*measured, _Signs.of(beside, none, none)]


def _known(read: Callable[[], Content]) -> Content | None:
    """What ``read`` makes of a file; None, with a warning, for what is no file that hpclm has written. HpclmError for the disk."""
    try:
        return read()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in MACHINE:
            raise unread(error, error.filename, "") from error
        log.warning("%s is left out: %s", error.filename, error.strerror)
        return None


def _last_of_each(table: StepTable) -> StepTable:
    """The last row of each step, in the place of its first."""
    if (np.diff(table["step"]) > 0).all():
        return table
    first = np.unique(table["step"], return_index=True)[1]
    last = len(table) - 1 - np.unique(table["step"][::-1], return_index=True)[1]
    return table.taken(last[np.argsort(first)])


def _attempts(happened: Sequence[Row], signs: list[_Signs]) -> Iterator[Attempt]:
    """The attempts; each has the rows of metrics.jsonl and metrics.lost.jsonl from its start to the next one's."""
    known = [attempt for attempt in events.attempts(happened) if moment(attempt.began["time"])]
    submitted = {str(event["job_id"]): moment(event["time"]) or 0.0 for event in events.of_kind(happened, "submitted")}
    bounds = [*(_started(attempt.began) for attempt in known), float("inf")]
    before: Attempt | None = None
    for number, (attempt, (entry, until)) in enumerate(zip(known, pairwise(bounds), strict=True), 1):
        row, end = attempt.began, attempt.ended
        after = known[number].began if number < len(known) else {}
        parts = [part.between(entry, until) for part in signs]
        alive = [float(part.times[-1]) for part in parts if len(part.times)]
        finish = max(moment(row["time"]) or 0.0, moment(end.get("time") or "") or 0.0, *alive)
        first = row.get("from_step") or 0
        last = max(int(np.fmax.reduce(part.steps, initial=first)) for part in parts)
        saved = min(last, after.get("from_step") or 0) if after else last
        training, lost = (min(part.first_after(step, finish) for part in parts) for step in (-1, saved))
        queued, job = entry, row.get("job_id")
        requeued = before is not None and job is not None and job == before.row.get("job_id")
        if str(job) in submitted or requeued:  # otherwise nothing says that it was in a queue
            queued = max(submitted.get(str(job), 0.0), before.end if before else 0.0)
        marks = queued, max(queued, entry), training, lost, finish
        phases = tuple(
            Phase(kind, *span) for kind, span in zip(KINDS, pairwise(marks), strict=True) if span[0] < span[1]
        )
        ended = _ended(end, after)
        before = Attempt(
            number, row, phases or (Phase("starting", finish, finish),), first, last, saved, ended, end.get("code")
        )
        yield before


def _started(row: Row) -> float:
    """When an attempt began; the time of the event is cut to whole seconds."""
    return row.get("began") or (moment(row["time"]) or 1.0) - 1


def _ended(end: Row, after: Row) -> str:
    """What ended an attempt, by the next one or by itself; empty while it may still run."""
    if why := str(after.get("after", "")):
        return why.rpartition(RESTARTED)[2]
    if end:
        return str(end.get("ending") or end.get("cause") or ENDINGS.get(end["code"], f"exit code {end['code']}"))
    return summary.KILLED if after else ""
