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
FRESH = re.compile(r"cores? \d[\d,-]*, |.*; fp32 products ")  # what an attempt says first
BEGINS = re.compile(r"run directory .*(?:(?:resumes|goes on) from step \d+|a new run)$")
SAVED = re.compile(r"saved step (\d+) in ([\d.]+) s; training waited ([\d.]+) s")
STEP = re.compile(r"step (\d+)(?:/\d+)?  loss ")
AGAIN = re.compile(r"start \d+ of job \S+; why the last one ended: (.*)")
FIGURES = {
    **rows.STEP,
    **dict.fromkeys(
        ("memory", "mfu", "data_seconds", "data_fraction", "validation_perplexity"), rows.maybe(rows.figure)
    ),
}
CODES = {0: "finished", 85: "told to exit; saved, to be started again", 93: "diverged"}
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


def read(out: Path) -> History:
    """The history of the run in ``out``."""
    readings = [rows.parsed(line, FIGURES, ["step"]) for line in _lines(out / "metrics.jsonl")]
    measured = [row for row in readings if row]
    lost = list({(row["step"], row.get("time")): row for row in _rows(out / rows.LOST, FIGURES, ["step"])}.values())
    begun = [row for row in _rows(out / "attempts.jsonl", rows.ATTEMPT, ["time"]) if moment(row["time"])]
    ends = {row["attempt"]: row for row in _rows(out / "ends.jsonl", rows.END, ["attempt", "code"])}
    submitted = {each.job_id: when for each in _submissions(out) if (when := moment(each.time))}
    chunks = _by_attempt(list(_log(out / "log.txt")), [moment(row["time"]) or 0.0 for row in begun])
    attempts: list[Attempt] = []
    for number, (row, lines) in enumerate(zip(begun, chunks, strict=True), 1):
        after = begun[number] if number < len(begun) else None
        told = next(
            (found[1] for line in (chunks[number : number + 1] or [[]])[0] if (found := AGAIN.match(line.text))), ""
        )
        job, before = row.get("job_id"), begun[number - 2] if number > 1 else {}
        requeued = job is not None and job == before.get("job_id")
        context = Context(after, attempts[-1].end if attempts else None, submitted.get(str(job)), requeued, told)
        attempts.append(_attempt(number, row, ends.get(number), lines, [*measured, *lost], context))
    steps = [row for row in measured if "loss" in row]
    return History(
        out,
        tuple(attempts),
        tuple({row["step"]: row for row in steps}.values()),
        tuple(row for row in measured if "validation_loss" in row),
        tuple(row for row in lost if "loss" in row),
        tuple(row for row in measured if "tasks" in row),
        readings[:-1].count(None),
    )


@dataclass(frozen=True)
class Context:
    """What is around an attempt."""

    after: Row | None
    """The next attempt's line of attempts.jsonl."""
    before: float | None
    """When the attempt before it ended."""
    submitted: float | None
    """When its job was submitted."""
    requeued: bool
    """Whether its job is that of the attempt before it."""
    told: str
    """Why it ended, in Slurm's words as the next attempt found them."""


def _attempt(
    number: int, row: Row, end: Row | None, lines: Sequence[Line], measured: Iterable[Row], context: Context
) -> Attempt:
    began = moment(row["time"]) or 0.0
    until = (moment(context.after["time"]) if context.after else None) or float("inf")
    since = began - 1  # what attempts.jsonl says is cut to whole seconds
    mine = [(r["time"], r) for r in measured if r.get("time") and since <= r["time"] < until]
    mine.sort(key=lambda each: each[0])
    steps = [(when, r) for when, r in mine if "loss" in r]
    first = row.get("from_step") or 0
    told = [int(found[1]) for line in lines if (found := STEP.match(line.text))]
    last = max([first, *told, *(r["step"] for _, r in steps)])
    saved = (context.after.get("from_step") or 0) if context.after else last
    orderly = (moment(end["time"]) or 0.0) if end and "time" in end else 0.0
    finish = max([began, orderly, *(line.time for line in lines), *(when for when, _ in mine)])
    begins = [line.time for line in lines if STEP.match(line.text)] + [
        when - (r.get("step_seconds") or 0.0) for when, r in steps[:1]
    ]
    training = min(begins, default=finish)
    entry = min([began, *(line.time for line in lines)])
    waited = context.submitted or context.requeued  # otherwise nothing says that it was in a queue
    queued = max(context.submitted or 0.0, context.before or 0.0) if waited else entry
    marks = [("queued", queued, entry), ("starting", max(queued, entry), training)]
    marks += _trained(training, finish, _lost_from(saved, last, finish, steps, lines), _stalls(lines))
    phases = tuple(Phase(kind, begin, to) for kind, begin, to in marks if to > begin)
    return Attempt(
        number, row, phases or (Phase("starting", began, began),), first, last, min(saved, last),
        _ended(end, lines, context),
    )  # fmt: skip


def _lost_from(
    saved: int, last: int, finish: float, steps: Sequence[tuple[float, Row]], lines: Sequence[Line]
) -> float:
    """When the first step that had to be done again began."""
    if saved >= last:
        return finish
    redone = [when - (row.get("step_seconds") or 0.0) for when, row in steps if row["step"] > saved]
    if redone:
        return min(redone)
    published = [line.time for line in lines if (found := SAVED.match(line.text)) and int(found[1]) <= saved]
    later = [line.time for line in lines if (found := STEP.match(line.text)) and int(found[1]) > saved]
    return max(published, default=min(later, default=finish))


def _stalls(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """When training waited for a save."""
    found = [(line.time, match) for line in lines if (match := SAVED.match(line.text))]
    return [(when - float(match[2]), when - float(match[2]) + float(match[3])) for when, match in found]


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


def _ended(end: Row | None, lines: Sequence[Line], context: Context) -> str:
    """What ended an attempt, in words."""
    signal = next((found[1] for line in reversed(lines) if (found := re.match(r"(SIG\w+): ", line.text))), "")
    error = next((line.text for line in reversed(lines) if line.level in "EC"), "")
    if end:
        told = next((line.text for line in reversed(lines) if re.match(r"(done|stopped) at step", line.text)), "")
        words = CODES.get(end["code"], f"exit code {end['code']}")
        if end["code"] == 0 and told.startswith("stopped"):
            words = told.split(";")[0]
        words = f"{words} ({signal})" if signal else words
        return f"{words}; {context.told}" if context.told and end["code"] else words
    if error:
        return error.splitlines()[0][:300]
    if context.told:
        return context.told
    return "killed, or its node failed: it left no message" if context.after else ""


def _by_attempt(log: Sequence[Line], times: Sequence[float]) -> list[list[Line]]:
    """The lines of each attempt, which begin some seconds before its line in attempts.jsonl."""
    ends = [number for number, line in enumerate(log) if BEGINS.match(line.text)]
    if len(ends) != len(times):  # part of the log is gone: by time
        bounds = [*times, float("inf")][1:]
        return [[line for line in log if begin <= line.time < end] for begin, end in zip(times, bounds, strict=True)]
    starts = [_first(log, end) for end in ends]
    return [list(log[begin:to]) for begin, to in pairwise([*starts, len(log)])]


def _first(log: Sequence[Line], begins: int) -> int:
    """The first line of the attempt whose line BEGINS is number ``begins``."""
    first = begins
    for number in range(begins - 1, -1, -1):
        if FRESH.match(log[number].text):
            first = number
        elif first < begins or BEGINS.match(log[number].text):
            break
    return first


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return files.read_text(path, LARGEST, errors="replace").splitlines()
    return []


def _log(path: Path) -> Iterator[Line]:
    for line in _lines(path):
        if found := STAMP.match(line):
            with suppress(ValueError, OverflowError):
                when = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(found[2]) / 1000
                yield Line(when, found[3], found[4])


def _rows(path: Path, fields: Mapping[str, rows.Check], needs: Iterable[str]) -> Iterator[Row]:
    return (row for line in _lines(path) if (row := rows.parsed(line, fields, needs)))


def _submissions(out: Path) -> list[submissions.Submission]:
    with suppress(OSError):
        return submissions.read(out)
    return []
