"""Which jobs a run directory has seen: a line of jobs.jsonl for each submission, on Slurm, mpirun or this machine."""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpclm.job import rows

NAME = "jobs.jsonl"


@dataclass(frozen=True)
class Submission:
    """One job of a run."""

    cluster: str
    """slurm, mpirun or local."""
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
    """Words that submitted it, secrets taken out."""
    folder: str = ""
    """Working directory the command was typed in."""
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))


def append(out: Path, submission: Submission) -> None:
    """Add a line to the ledger of the run directory ``out``, in one write."""
    handle = os.open(out / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, (json.dumps(asdict(submission)) + "\n").encode())
    finally:
        os.close(handle)


def read(out: Path) -> list[Submission]:
    """Every submission, oldest first; none where there is no ledger. Lines that are no submission are passed over."""
    found: list[Submission] = []
    if not (out / NAME).is_file():
        return found
    with suppress(FileNotFoundError):
        for line in (out / NAME).read_text(encoding="utf-8", errors="replace").splitlines():
            row = rows.parsed(line, rows.SUBMISSION)
            with suppress(TypeError):  # it lacks something, or has too much
                found.extend([Submission(**row)] if row else [])
    return found
