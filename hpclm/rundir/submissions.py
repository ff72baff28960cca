"""What a launch leaves for a run: a line in jobs.jsonl for each submission, to Slurm, mpirun or this machine, and the request to
roll back to an older checkpoint, rollback.json.

The request is written before the run is submitted, and removed after everything newer has been set aside. Whatever is killed
in between, the next attempt rolls back to that step, and only once.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpclm import files
from hpclm.errors import ConfigError, unread
from hpclm.rundir import rows

NAME = "jobs.jsonl"
ROLLBACK = "rollback.json"
FIELDS: dict[str, rows.Kind] = {
    **dict.fromkeys(("cluster", "job_id", "host", "machine", "time", "log", "folder", "script", "slurm_cluster"), str),
    **dict.fromkeys(("nodes", "tasks_per_node", "steps"), int),
}
NEEDED = ("cluster", "job_id", "host", "nodes", "tasks_per_node", "log", "time")


@dataclass(frozen=True)
class Submission:
    """One job of a run."""

    cluster: str
    """slurm, or another scheduler; mpirun or local."""
    job_id: str
    """Slurm's number (of an array's task: 12_3); elsewhere the number of the launching process."""
    host: str
    """Where it was submitted, or where the launching process is."""
    nodes: int
    tasks_per_node: int
    log: str
    """Path of the job's own log: what the processes printed, rank 0's stream."""
    script: str | None = None
    """Path of the script that was submitted."""
    command: list[str] = field(default_factory=list)
    """The command that submitted it, secrets removed."""
    folder: str = ""
    """Working directory of that command."""
    steps: int | None = None
    """Steps that the budget allows, where the settings alone say it."""
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    slurm_cluster: str = ""
    """The cluster of Slurm that it was sent to, where another one than that of ``host`` was named."""
    machine: str = ""
    """Where ``job_id``, if it is that of a process, means that process (``files.here``); empty in old records."""

    @property
    def is_job(self) -> bool:
        """Whether it is a job of a scheduler, not a launch in the foreground."""
        return self.cluster not in ("local", "mpirun")


def append(out: Path, submission: Submission) -> None:
    """Add a line to jobs.jsonl in the run directory ``out``."""
    rows.append(out / NAME, asdict(submission))


def read(out: Path) -> list[Submission]:
    """Every submission, oldest first. OSError if the file cannot be read."""
    with suppress(FileNotFoundError):
        return [Submission(**row) for row in rows.stream(f"{out}/{NAME}", FIELDS, NEEDED)]
    return []


def roll_back(out: Path, step: int) -> None:
    """Request that the next attempt of the run in ``out`` resumes from the checkpoint of ``step``."""
    files.sweep(out / ROLLBACK)  # left by a killed process
    files.write_text(out / ROLLBACK, json.dumps({"step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}) + "\n")


def rollback(out: Path) -> int | None:
    """The step that the next attempt rolls back to, None without a request; ConfigError for a file without a step, HpclmError for the disk."""
    path = out / ROLLBACK
    if not path.exists():
        return None
    try:
        text = files.read_text(path, errors="replace")
    except OSError as error:
        raise unread(error, path, "remove it, and repeat --from STEP") from None
    row = rows.parsed(text, {"step": int, "time": str}, ["step"])
    if row is None:
        raise ConfigError(f"{path} has no step to go back to; remove it, and repeat --from STEP")
    return int(row["step"])


def withdraw_rollback(out: Path) -> None:
    """Remove the request, when it is withdrawn or carried out."""
    (out / ROLLBACK).unlink(missing_ok=True)
    files.sync(out)
