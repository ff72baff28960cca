"""events.jsonl has a line for each event of a run. The process that knows of an event writes it once; others only read the lines.

| kind | writer | facts |
|---|---|---|
| submitted | the process that submits a job or launches ranks | cluster, job_id, nodes, tasks_per_node, script, log, command, config |
| began | rank 0, when an attempt begins | from_step, samples, planned, phases, without, steps, config, launcher, job_id, restart, host, pid, versions, ... |
| ended | a rank | code, state, ending, step, over (nothing is left to do) |
| ended | the process that started the ranks | code, cause, signal |
| cancelled | hpclm cancel | by |
| roll back | --from STEP | step to go back to; null if the request is withdrawn |
| rolled back | rank 0, when it has gone back | step |
| reached | rank 0, before it drops rows of steps that will be repeated | step: the last one that was trained |
| branched | hpclm branch | trunk: the run that this one goes on from; step; attempts: of the trunk until then |
| preflight, corrupt, hang, slow | rank 0 | its findings |
| sink | the process that sends metrics to the sink | sink; cause: why the sink lacks rows, empty once it has them all |
"""

import json
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpclm.base import files
from hpclm.base.errors import ConfigError, unread
from hpclm.rundir import rows
from hpclm.rundir.rows import Kind, Row, fits

NAME = "events.jsonl"
MAX_LINE_BYTES = 4096
PHASE = "phase"
"""State of an attempt that has saved because the next phase of the data needs another start of the ranks."""


def is_job_id(value: Any) -> bool:
    """Whether ``value`` may be the ID of a job."""
    return fits(value, int) or fits(value, str)


def is_bool(value: Any) -> bool:
    """Whether ``value`` is true or false."""
    return isinstance(value, bool)


def are_objects(value: Any) -> bool:
    """Whether ``value`` is a list of objects."""
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("time", "kind", "host", "machine", "config", "more"), str),
    # submitted
    **dict.fromkeys(("cluster", "slurm_cluster", "log", "folder", "script"), str),
    **dict.fromkeys(("nodes", "tasks_per_node", "steps"), int),
    "job_id": is_job_id,
    # began
    **dict.fromkeys(("launcher", "after", "git", "digest", "without"), str),
    **dict.fromkeys(
        ("from_step", "samples", "planned", "size", "pid", "restart", "back_to", "micro_size", "context", "attempts"),
        int,
    ),
    "hosts": list,
    "began": float,
    # ended, cancelled
    **dict.fromkeys(("state", "ending", "cause", "by", "sink", "trunk"), str),
    **dict.fromkeys(("step", "code", "signal", "generation"), int),
    "over": is_bool,
    "phases": are_objects,
    # preflight, corrupt
    "bad": list,
}
"""The fields that hpclm reads. An event may lack some of these fields, and may have others."""
NEEDED: dict[str, Sequence[str]] = {
    "submitted": ("cluster", "job_id", "nodes", "tasks_per_node"),
    "ended": ("code",),
    "cancelled": ("by",),
    "branched": ("trunk", "step"),
    "sink": ("sink", "cause"),
}
"""The fields that every event of a kind has."""


def append(out: Path, kind: str, **facts: Any) -> None:
    """Add an event to the run in ``out``, and fsync it. OSError if it cannot be written.

    If an event does not fit into a line of 4 KiB, its largest facts go to another file, which the line names as ``more``.
    """
    row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "kind": kind, **facts}
    large = dict[str, Any]()
    while len(json.dumps(row)) > MAX_LINE_BYTES - 100:
        name = max(row, key=lambda name: len(json.dumps(row[name])))
        large[name] = row.pop(name)
    if large:
        folder = out / "logs"
        folder.mkdir(0o700, exist_ok=True)
        path = folder / f"{kind.replace(' ', '-')}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}.json"
        files.write_text(path, json.dumps(large, indent=1) + "\n")
        row["more"] = f"logs/{path.name}"
    path = out / NAME
    os.close(files.appending(path))  # the lock would create it with more rights
    with files.locked(path):  # NFS does not append atomically
        rows.append(path, row)


def read_events(out: Path | str) -> list[dict[str, Any]]:
    """The events of the run in ``out``, oldest first; empty without the file. OSError, or ConfigError if a line is damaged."""
    path = f"{out}/{NAME}"
    happened = list[dict[str, Any]]()
    with suppress(FileNotFoundError):
        for offset, line in rows.lines(path):
            row = rows.parsed(line, FIELDS, ("time", "kind"))
            if row is None or not rows.sane(row, FIELDS, NEEDED.get(row["kind"], ())):
                raise rows.damaged(path, offset)
            happened.append(row)
    return happened


def of_kind(happened: Iterable[Row], kind: str) -> list[Row]:
    """The events with the kind ``kind``."""
    return [event for event in happened if event["kind"] == kind]


@dataclass(frozen=True)
class AttemptEvents:
    """The events of one attempt at a run."""

    began: Row
    ended: Row
    """The end that a rank recorded, otherwise the one that its launcher recorded; empty without either."""

    @property
    def orderly(self) -> bool:
        """Whether the attempt ended in order: done, or saved after a signal or before a phase."""
        return self.ended.get("state") in ("done", "stopped", "exited", PHASE)


def attempts(happened: Iterable[Row]) -> list[AttemptEvents]:
    """The attempts in a run's events, oldest first."""
    found = list[AttemptEvents]()
    for event in happened:
        if event["kind"] == "began":
            found.append(AttemptEvents(event, {}))
        elif event["kind"] == "ended" and found:
            last = found[-1]
            other = is_later(event, last.began) or is_later(last.began, event)
            if not other and not last.ended.get("state") and (event.get("state") or not last.ended):
                found[-1] = AttemptEvents(last.began, event)
    return found


def last_end(happened: Iterable[Row]) -> Row:
    """The event that says how the last start ended, even if the start did not begin to train; empty without one."""
    began: Row = {}
    found: Row = {}
    for event in happened:
        if event["kind"] == "began":
            began = event
            found = {}
        elif event["kind"] == "ended" and not is_later(began, event):
            says_more = event.get("state") and not found.get("state")
            if not found or says_more or is_later(event, {**began, **found}):
                found = event
    return found


def state_of(end: Row) -> str:
    """The state of a run whose last start ended with the event ``end``; empty if no rank has recorded it."""
    state = end.get("state") or ""
    return "exited" if state == PHASE else state


def is_later(event: Row, other: Row) -> bool:
    """Whether ``event`` belongs to a later start than ``other``, by the lease's generation or the job's restart count."""
    return any(
        (event.get(name) or 0) > other[name] for name in ("generation", "restart") if other.get(name) is not None
    )


def unsent(happened: Iterable[Row]) -> dict[str, str]:
    """Sink -> cause, for the sinks that lack rows of metrics.jsonl."""
    causes = {event["sink"]: event["cause"] for event in of_kind(happened, "sink")}
    return {sink: cause for sink, cause in causes.items() if cause}


def rollback(out: Path) -> int | None:
    """``pending_rollback`` of the run in ``out``. Errors: see ``read_or_refuse``."""
    return pending_rollback(read_or_refuse(out))


def pending_rollback(happened: Iterable[Row]) -> int | None:
    """The step of the checkpoint that the next attempt goes back to; None if it continues from the newest checkpoint."""
    step = None
    for event in happened:
        if event["kind"] == "roll back":
            step = event.get("step")
        elif event["kind"] == "rolled back":
            step = None
    return step


def read_or_refuse(out: Path) -> list[dict[str, Any]]:
    """``read_events``, with ConfigError or HpclmError instead of OSError: a run must not continue without its record."""
    try:
        return read_events(out)
    except OSError as error:
        raise unread(error, out / NAME, "move it away, or choose another out") from None


def whole(out: Path, event: Row) -> dict[str, Any]:
    """``event`` with the facts in its other file, if any. OSError if the file cannot be read, ConfigError if it is damaged."""
    if not event.get("more"):
        return dict(event)
    path = out / event["more"]
    more = rows.parsed(files.read_text(path, errors="replace"), FIELDS)
    if more is None:
        raise ConfigError(f"{path} is damaged; restore it from a copy, because an event in {NAME} names it")
    return {**event, **more}
