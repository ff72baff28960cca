"""What became of a run's attempts: when each was queued, started and trained, what it lost, and what ended it.

Everything is read from the run directory: attempts.jsonl, ends.jsonl, jobs.jsonl, metrics.jsonl, metrics.lost.jsonl and
summary.json. What a file does not say is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.rundir import rows, submissions, summary
from hpclm.rundir.status import moment

LARGEST = 1 << 31  # bytes of a file that is read whole
LATEST = 1 << 36  # seconds since 1970 that are a time
RESTARTED = "why the last one ended: "
FIGURES = {
    **rows.STEP,
    **dict.fromkeys(("memory", "mfu", "data_seconds", "data_fraction", "validation_perplexity"), float),
}
CODES = {0: "finished", 85: "preempted; saved, will be requeued", 93: "diverged"}
KINDS = ("queued", "starting", "training", "lost")
Row = Mapping[str, Any]


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
    """Its line of attempts.jsonl."""
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
    steps: tuple[Row, ...]
    """A row for each step that counts, in order."""
    evaluations: tuple[Row, ...]
    lost: tuple[Row, ...]
    """Rows of steps that were done again."""
    tasks: tuple[Row, ...] = ()
    """Scores at tasks (evaluate.tasks)."""
    state: str = ""
    """The state in which it ended, one of ``summary.ENDED``; empty if its files do not say."""
    damaged: int = field(default=0, compare=False)
    """Lines of metrics.jsonl that cannot be read, but the last, which may still be being written."""

    @property
    def wall(self) -> float:
        """Seconds from the first submission, or start, to the last sign of life."""
        return self.attempts[-1].end - self.attempts[0].begin if self.attempts else 0.0

    @property
    def goodput(self) -> float | None:
        """The part of the wall time that went into training steps that count."""
        kept = sum(row["step_seconds"] for row in self.steps if row.get("step_seconds"))
        return min(1.0, kept / self.wall) if self.wall > 0 else None

    def seconds(self, kind: str) -> float:
        """Time of all attempts in the phases of this kind."""
        return sum(attempt.seconds(kind) for attempt in self.attempts)


def read(out: Path) -> History:
    """The history of the run in ``out``."""
    lines = [rows.parsed(line, FIGURES, ["step"]) for line in _lines(out / "metrics.jsonl")]
    kept = [row for row in lines if row]
    repeated = (rows.parsed(line, FIGURES, ["step"]) for line in _lines(out / rows.LOST))
    lost = list({(row["step"], row.get("time")): row for row in repeated if row}.values())
    return History(
        out,
        tuple(_attempts(out, [*kept, *lost])),
        tuple({row["step"]: row for row in kept if "loss" in row}.values()),
        tuple(row for row in kept if "validation_loss" in row),
        tuple(row for row in lost if "loss" in row),
        tuple(row for row in kept if "tasks" in row),
        state if (state := summary.read(out).get("state", "")) in summary.ENDED else "",
        lines[:-1].count(None),
    )


def _attempts(out: Path, measured: Sequence[Row]) -> Iterator[Attempt]:
    """The attempts; each has the rows of metrics.jsonl and metrics.lost.jsonl from its start to the next one's."""
    begun = rows.parsed_lines("\n".join(_lines(out / "attempts.jsonl")), rows.ATTEMPT, ["time"])
    begun = [row for row in begun if moment(row["time"])]
    ends = rows.parsed_lines("\n".join(_lines(out / "ends.jsonl")), rows.END, ["attempt", "code"])
    end_of = {row["attempt"]: row for row in ends}
    submitted: dict[str, float] = {}
    with suppress(OSError):
        submitted = {each.job_id: when for each in submissions.read(out) if (when := moment(each.time))}
    timed = sorted((row for row in measured if 0 < (row.get("time") or 0) < LATEST), key=lambda row: float(row["time"]))
    bounds = [*map(_started, begun), float("inf")]
    before: Attempt | None = None
    for number, (row, (entry, until)) in enumerate(zip(begun, pairwise(bounds), strict=True), 1):
        after = begun[number] if number < len(begun) else {}
        end = end_of.get(number, {})
        own = [each for each in timed if entry <= each["time"] < until]
        finish = max(
            moment(row["time"]) or 0.0, moment(end.get("time") or "") or 0.0, *(each["time"] for each in own[-1:])
        )
        first, steps = row.get("from_step") or 0, [each for each in own if "loss" in each]
        last = max([first, *(each["step"] for each in steps)])
        saved = min(last, after.get("from_step") or 0) if after else last
        begins = {each["step"]: each["time"] - (each.get("step_seconds") or 0.0) for each in steps}
        training = min(begins.values(), default=finish)
        lost = min((begin for step, begin in begins.items() if step > saved), default=finish)
        queued, job = entry, row.get("job_id")
        requeued = before is not None and job is not None and job == before.row.get("job_id")
        if str(job) in submitted or requeued:  # otherwise nothing says that it was in a queue
            queued = max(submitted.get(str(job), 0.0), before.end if before else 0.0)
        marks = queued, max(queued, entry), training, lost, finish
        phases = tuple(
            Phase(kind, *span) for kind, span in zip(KINDS, pairwise(marks), strict=True) if span[0] < span[1]
        )
        ended = _ended(end, after, {} if after else summary.read(out))
        before = Attempt(
            number, row, phases or (Phase("starting", finish, finish),), first, last, saved, ended, end.get("code")
        )
        yield before


def _started(row: Row) -> float:
    """When an attempt began; what only attempts.jsonl says is cut to whole seconds."""
    return row.get("began") or (moment(row["time"]) or 1.0) - 1


def _ended(end: Row, after: Row, standing: Row) -> str:
    """What ended an attempt, by the next one, by itself or by the run's summary; empty while it may still run."""
    if why := str(after.get("after", "")):
        return why.rpartition(RESTARTED)[2]
    if end:
        return str(end.get("ending") or CODES.get(end["code"], f"exit code {end['code']}"))
    return str(standing.get("ending", "")) or (summary.KILLED if after else "")


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return files.read_text(path, LARGEST, errors="replace").splitlines()
    return []
