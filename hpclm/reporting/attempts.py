"""The attempts of a run: when each was queued, started and trained, what it lost, and how it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ExitCode
from hpclm.rundir import events, summary
from hpclm.rundir.rows import Row
from hpclm.rundir.state import moment

LATEST = 1 << 36  # seconds since 1970; larger numbers are not valid times
RESTARTED = "why the last one ended: "
ENDINGS: Mapping[int, str] = {
    ExitCode.DONE: "finished",
    ExitCode.REQUEUE: "preempted; saved, will be requeued",
    ExitCode.DIVERGED: "diverged",
}
KINDS = ("queued", "starting", "training", "lost")
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Phase:
    """A part of an attempt; times are seconds since 1970."""

    kind: str
    """One of KINDS."""
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """The duration of the phase."""
        return self.end - self.begin


@dataclass(frozen=True)
class AttemptReport:
    """One start of a run: its phases, its steps and its end."""

    number: int
    row: Row
    """The event at the start of the attempt."""
    phases: tuple[Phase, ...]
    """In order, without overlaps."""
    first: int
    """The step it resumed from."""
    last: int
    """The last step it did."""
    saved: int
    """The attempt's last step that did not have to be redone."""
    ended: str
    """How it ended; empty while it may still run."""
    code: int | None = None
    """Its exit code, if it exited cleanly."""
    interrupted: bool = False
    """Whether it ended otherwise than as its settings say."""

    @property
    def begin(self) -> float:
        """The time at which it was queued, or else began."""
        return self.phases[0].begin

    @property
    def end(self) -> float:
        """The time of its last sign of life."""
        return self.phases[-1].end

    @property
    def lost(self) -> int:
        """The number of steps that had to be redone."""
        return max(0, self.last - self.saved)

    def seconds(self, kind: str) -> float:
        """Time in the phases of this kind."""
        return sum(phase.seconds for phase in self.phases if phase.kind == kind)


@dataclass(frozen=True)
class Signs:
    """Signs of life in the order of their times, [N] each."""

    times: Array
    steps: Array
    """NaN for other signs than steps."""
    seconds: Array
    """The duration of each step; NaN if unknown."""

    @classmethod
    def sorted(cls, times: Array, steps: Array, seconds: Array) -> "Signs":
        """The signs with a valid time, in order."""
        if len(times) and times[0] > 0 and times[-1] < LATEST and (np.diff(times) >= 0).all():
            return cls(times, steps, seconds)  # a copy of millions of signs would take much memory
        order = np.argsort(times, kind="stable")
        order = order[(times[order] > 0) & (times[order] < LATEST)]
        return cls(times[order], steps[order], seconds[order])

    def between(self, begin: float, end: float) -> "Signs":
        """The signs from ``begin`` to before ``end``."""
        part = slice(*np.searchsorted(self.times, [begin, end]))
        return Signs(self.times[part], self.steps[part], self.seconds[part])

    def first_after(self, step: float, otherwise: float) -> float:
        """The time at which the first step after ``step`` began; ``otherwise`` without such a step."""
        begins = (self.times - np.nan_to_num(self.seconds))[self.steps > step]
        return float(begins.min(initial=otherwise))


def attempts(happened: Sequence[Row], signs: Sequence[Signs]) -> list[AttemptReport]:
    """The attempts among some events; the signs of life between two starts belong to the first."""
    known = [attempt for attempt in events.attempts(happened) if moment(attempt.began["time"])]
    submitted = {str(event["job_id"]): moment(event["time"]) or 0.0 for event in events.of_kind(happened, "submitted")}
    begins = [*(_started(attempt.began) for attempt in known), float("inf")]
    made: list[AttemptReport] = []
    for attempt, (begin, until) in zip(known, pairwise(begins), strict=True):
        number = len(made) + 1
        after = known[number].began if number < len(known) else {}
        queued = _queued(attempt.began, submitted, made[-1] if made else None)
        parts = [part.between(begin, until) for part in signs]
        made.append(_attempt(number, attempt, after, begin if queued is None else queued, begin, parts))
    return made


def _attempt(
    number: int, attempt: events.AttemptEvents, after: Row, queued: float, begin: float, signs: Sequence[Signs]
) -> AttemptReport:
    """``after``: the event at the start of the next attempt; empty without a next attempt."""
    row = attempt.began
    end = attempt.ended
    alive = [float(part.times[-1]) for part in signs if len(part.times)]
    finish = max(moment(row["time"]) or 0.0, moment(end.get("time") or "") or 0.0, *alive)
    first = row.get("from_step") or 0
    last = max(int(np.fmax.reduce(part.steps, initial=first)) for part in signs)
    saved = min(last, after.get("from_step") or 0) if after else last
    training = min(part.first_after(-1, finish) for part in signs)
    lost = min(part.first_after(saved, finish) for part in signs)
    marks = pairwise((queued, max(queued, begin), training, lost, finish))
    phases = [Phase(kind, *times) for kind, times in zip(KINDS, marks, strict=True)]
    taken = [phase for phase in phases if phase.begin < phase.end] or [Phase("starting", finish, finish)]
    interrupted = end.get("code") != ExitCode.DONE and end.get("state") != events.PHASE
    return AttemptReport(
        number, row, tuple(taken), first, last, saved, _ended(end, after), end.get("code"), interrupted
    )


def _queued(row: Row, submitted: Mapping[str, float], before: AttemptReport | None) -> float | None:
    """The time at which an attempt was queued; None if no event shows that it was in a queue."""
    job = row.get("job_id")
    requeued = before is not None and job is not None and job == before.row.get("job_id")
    if before and requeued and row.get("restart") is not None and row["restart"] == before.row.get("restart"):
        return None  # started again inside the job
    if str(job) not in submitted and not requeued:
        return None
    times = [submitted.get(str(job), 0.0)]
    if before:
        times.append(before.end)
    return max(times)


def _started(row: Row) -> float:
    """The time at which an attempt began. The time of its event is rounded down to seconds."""
    began: float = row.get("began") or (moment(row["time"]) or 1.0) - 1
    return began


def _ended(end: Row, after: Row) -> str:
    """How an attempt ended, according to the next attempt or to itself; empty while it may still run."""
    why: Any = after.get("after")
    if why:
        return str(why).rpartition(RESTARTED)[2]
    if end:
        return str(end.get("ending") or end.get("cause") or ENDINGS.get(end["code"], f"exit code {end['code']}"))
    return summary.KILLED if after else ""
