"""What became of a run's attempts: when each was queued, started, trained and saved, what it lost, and what ended it.

Everything is read from the run directory: attempts.jsonl, ends.jsonl, jobs.jsonl, metrics.jsonl, metrics.lost.jsonl and
log.txt. What a file does not say is left out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.rundir import rows, submissions
from hpclm.rundir.status import moment

LARGEST = 1 << 31  # bytes of a file that is read whole
STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([DIWEC]) (.*)")
SAVED = re.compile(r"saved step (\d+) in ([\d.]+) s; training waited ([\d.]+) s")
RESTARTED = "why the last one ended: "
FIGURES = {
    **rows.STEP,
    **dict.fromkeys(
        ("memory", "mfu", "data_seconds", "data_fraction", "validation_perplexity"), rows.maybe(rows.figure)
    ),
}
CODES = {0: "finished", 85: "preempted; saved, will be requeued", 93: "diverged"}
KINDS = ("queued", "starting", "training", "saving", "lost")
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
    damaged: int = field(default=0, compare=False)
    """Lines of metrics.jsonl that cannot be read, but the last, which may still be being written."""

    @property
    def wall(self) -> float:
        """Seconds from the first submission, or start, to the last sign of life."""
        return self.attempts[-1].end - self.attempts[0].begin if self.attempts else 0.0

    @property
    def kept(self) -> float:
        """Seconds in training steps that count."""
        return sum(row["step_seconds"] for row in self.steps if row.get("step_seconds"))

    @property
    def goodput(self) -> float | None:
        """The part of the wall time that went into training steps that count."""
        return min(1.0, self.kept / self.wall) if self.wall > 0 else None

    def seconds(self, kind: str) -> float:
        """Time of all attempts in the phases of this kind."""
        return sum(attempt.seconds(kind) for attempt in self.attempts)


@dataclass(frozen=True)
class Line:
    """A line of log.txt."""

    time: float
    level: str
    text: str


@dataclass(frozen=True)
class Records:
    """What a run's files say of one attempt."""

    number: int
    row: Row
    """Its line of attempts.jsonl."""
    after: Row
    """The next attempt's; empty without one."""
    end: Row
    """Its line of ends.jsonl; empty if it did not exit cleanly."""
    log: Sequence[Line]
    measured: Sequence[Row]
    """Its rows of metrics.jsonl and metrics.lost.jsonl, in order."""

    @property
    def entry(self) -> float:
        """When its process started, or is first heard of."""
        return min([_started(self.row), *(line.time for line in self.log)])

    @property
    def finish(self) -> float:
        """Its last sign of life."""
        ended = moment(self.end["time"]) if "time" in self.end else None
        signs = [*(line.time for line in self.log), *(row["time"] for row in self.measured)]
        return max([moment(self.row["time"]) or 0.0, ended or 0.0, *signs])


def read(out: Path) -> History:
    """The history of the run in ``out``."""
    lines = [rows.parsed(line, FIGURES, ["step"]) for line in _lines(out / "metrics.jsonl")]
    kept = [row for row in lines if row]
    lost = list({(row["step"], row.get("time")): row for row in _rows(out / rows.LOST, FIGURES, ["step"])}.values())
    attempts: list[Attempt] = []
    submitted = {each.job_id: when for each in _submissions(out) if (when := moment(each.time))}
    for records in _by_attempt(out, [*kept, *lost]):
        attempts.append(_attempt(records, attempts[-1] if attempts else None, submitted))
    return History(
        out,
        tuple(attempts),
        tuple({row["step"]: row for row in kept if "loss" in row}.values()),
        tuple(row for row in kept if "validation_loss" in row),
        tuple(row for row in lost if "loss" in row),
        tuple(row for row in kept if "tasks" in row),
        lines[:-1].count(None),
    )


def _by_attempt(out: Path, measured: Sequence[Row]) -> Iterator[Records]:
    """The files' lines, attempt by attempt: each has those from its start to the next one's."""
    begun = [row for row in _rows(out / "attempts.jsonl", rows.ATTEMPT, ["time"]) if moment(row["time"])]
    ends = {row["attempt"]: row for row in _rows(out / "ends.jsonl", rows.END, ["attempt", "code"])}
    log = list(_log(out / "log.txt"))
    timed = sorted((row for row in measured if row.get("time")), key=lambda row: float(row["time"]))
    bounds = [*map(_started, begun), float("inf")]
    for number, (row, (since, until)) in enumerate(zip(begun, pairwise(bounds), strict=True), 1):
        yield Records(
            number,
            row,
            begun[number] if number < len(begun) else {},
            ends.get(number, {}),
            [line for line in log if since <= line.time < until],
            [each for each in timed if since <= each["time"] < until],
        )


def _started(row: Row) -> float:
    """When an attempt began; what only attempts.jsonl says is cut to whole seconds."""
    return row.get("began") or (moment(row["time"]) or 1.0) - 1


def _attempt(records: Records, before: Attempt | None, submitted: Mapping[str, float]) -> Attempt:
    row, finish, entry = records.row, records.finish, records.entry
    steps = [each for each in records.measured if "loss" in each]
    first = row.get("from_step") or 0
    last = max([first, *(each["step"] for each in steps)])
    saved = min(last, records.after.get("from_step") or 0) if records.after else last
    begins = {each["step"]: each["time"] - (each.get("step_seconds") or 0.0) for each in steps}
    training = min(begins.values(), default=finish)
    lost = min((begin for step, begin in begins.items() if step > saved), default=finish)
    job = row.get("job_id")
    requeued = before is not None and job is not None and job == before.row.get("job_id")
    waited = str(job) in submitted or requeued  # otherwise nothing says that it was in a queue
    queued = max(submitted.get(str(job), 0.0), before.end if before else 0.0) if waited else entry
    marks = [("queued", queued, entry), ("starting", max(queued, entry), training)]
    marks += _trained(training, finish, lost, _stalls(records.log))
    phases = tuple(Phase(kind, begin, to) for kind, begin, to in marks if to > begin)
    idle = Phase("starting", finish, finish)
    return Attempt(records.number, row, phases or (idle,), first, last, saved, _ended(records))


def _stalls(log: Sequence[Line]) -> list[tuple[float, float]]:
    """When training waited for a save."""
    saves = [(line.time, match) for line in log if (match := SAVED.match(line.text))]
    return [(when - float(save[2]), when - float(save[2]) + float(save[3])) for when, save in saves]


def _trained(
    begin: float, end: float, lost: float, stalls: Sequence[tuple[float, float]]
) -> Iterator[tuple[str, float, float]]:
    """The time from ``begin`` to ``end`` in pieces: training, saving, and all that came after ``lost``."""
    at = begin
    for stall, over in sorted(stalls):
        if begin <= stall and at <= stall and over <= lost:
            yield "training", at, stall
            yield "saving", stall, over
            at = over
    yield "training", at, min(lost, end)
    yield "lost", max(at, lost), end


def _ended(records: Records) -> str:
    """What ended an attempt; empty while it may still run."""
    end, restarted = records.end, str(records.after.get("after", ""))
    why = restarted.partition(RESTARTED)[2] or restarted
    if end:
        text = end.get("ending") or CODES.get(end["code"], f"exit code {end['code']}")
        return f"{text}; {why}" if why and end["code"] else text
    error = next((line.text for line in reversed(records.log) if line.level in "EC"), "")
    return error[:300] or why or ("killed, or its node failed: it left no message" if records.after else "")


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return files.read_text(path, LARGEST, errors="replace").splitlines()
    return []


def _log(path: Path) -> Iterator[Line]:
    for line in _lines(path):
        if match := STAMP.match(line):
            with suppress(ValueError, OverflowError):
                when = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(match[2]) / 1000
                yield Line(when, match[3], match[4])


def _rows(path: Path, fields: Mapping[str, rows.Check], needs: Iterable[str] = ()) -> list[Row]:
    return rows.parsed_lines("\n".join(_lines(path)), fields, needs)


def _submissions(out: Path) -> list[submissions.Submission]:
    with suppress(OSError):
        return submissions.read(out)
    return []
