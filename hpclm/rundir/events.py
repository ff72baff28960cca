"""events.jsonl: what has happened to a run, a line for each event. Whoever knows something writes it here, once; all else folds the lines.

| kind | written by | facts |
|---|---|---|
| submitted | the command that submits or launches | cluster, job_id, nodes, tasks_per_node, script, log, command, config |
| began | rank 0, when an attempt begins | from_step, steps, config, launcher, job_id, restart, host, pid, versions, ... |
| ended | a rank (state, step, ending), the supervisor of a job (trained) | code, signal, cause |
| cancelled | hpclm cancel | by, now |
| going back | --from STEP | step, to which the next attempt goes back; null: withdrawn |
| went back | rank 0 | step |
| preflight, hang, corrupt, slow | rank 0 | what was found |
"""

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.errors import ConfigError, unread
from hpclm.folders import private_folder
from hpclm.rundir import rows
from hpclm.rundir.rows import Kind, Row, fits

NAME = "events.jsonl"
MAX_LINE_BYTES = 4096


def is_job_id(value: Any) -> bool:
    """Whether ``value`` may be the ID of a job."""
    return fits(value, int) or fits(value, str)


FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("time", "kind", "host", "machine", "config", "more"), str),
    # submitted
    **dict.fromkeys(("cluster", "slurm_cluster", "log", "folder", "script"), str),
    **dict.fromkeys(("nodes", "tasks_per_node", "steps"), int),
    "job_id": is_job_id,
    # began
    **dict.fromkeys(("launcher", "after", "git", "digest"), str),
    **dict.fromkeys(("from_step", "size", "pid", "restart", "back_to", "micro_size"), int),
    "hosts": list,
    "began": float,
    # ended, cancelled
    **dict.fromkeys(("state", "ending", "cause", "by"), str),
    **dict.fromkeys(("step", "code", "signal", "trained"), int),
    # preflight, corrupt
    "bad": list,
}
"""The fields that are read. An event may lack some of them, and may have others."""


def append(out: Path, kind: str, **facts: Any) -> None:
    """Add an event to the run in ``out``; it is on the disk when this returns. OSError if it cannot be written.

    The largest facts of an event that does not fit into a line of 4 KiB are in a file of their own, which the line names as ``more``.
    """
    row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "kind": kind, **facts}
    large = dict[str, Any]()
    while len(json.dumps(row)) > MAX_LINE_BYTES - 100:
        name = max(row, key=lambda name: len(json.dumps(row[name])))
        large[name] = row.pop(name)
    if large:
        folder = private_folder(out / "logs", "log folder")
        path = folder / f"{kind.replace(' ', '-')}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}.json"
        files.write_text(path, json.dumps(large, indent=1) + "\n")
        row["more"] = f"logs/{path.name}"
    path = out / NAME
    os.close(files.appending(path))  # the lock would create it with more rights
    with files.locked(path):  # NFS does not append atomically
        rows.append(path, row)


def read(out: Path | str) -> list[dict[str, Any]]:
    """The events of the run in ``out``, oldest first; none without the file. OSError if it cannot be read, ConfigError if a line is
    damaged."""
    try:
        return list(rows.stream(f"{out}/{NAME}", FIELDS, ("time", "kind")))
    except FileNotFoundError:
        return []


def read_or_refuse(out: Path) -> list[dict[str, Any]]:
    """``read``, with ConfigError or HpclmError instead of OSError: what happened must not be forgotten."""
    try:
        return read(out)
    except OSError as error:
        raise unread(error, out / NAME, "move it away, or choose another out") from None


def whole(out: Path, event: Row) -> dict[str, Any]:
    """An event with the facts that are in a file of their own. OSError if that cannot be read, ConfigError if it is damaged."""
    if not event.get("more"):
        return dict(event)
    path = out / event["more"]
    more = rows.parsed(files.read_text(path, errors="replace"), FIELDS)
    if more is None:
        raise ConfigError(f"{path} is damaged; an event in {NAME} names it")
    return {**event, **more}
