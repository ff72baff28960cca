"""This machine in place of a scheduler: a job is a process in the foreground that trains or launches the ranks."""

import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm.base.errors import ConfigError
from hpclm.launch.schedulers import JobScript, Scheduler
from hpclm.node import processes
from hpclm.node.job import Job

if TYPE_CHECKING:
    from hpclm.config import RunConfig

KILL = 5.0  # seconds after a second Ctrl-C until a process is killed


class LocalMachine(Scheduler):
    """Processes of this machine, by their PIDs."""

    def script(self, run: "RunConfig", path: Path, setup: Sequence[str], command: Sequence[str]) -> JobScript:
        """ConfigError: processes of this machine have no script."""
        raise ConfigError("--dry-run shows the script of a job, but a run on this machine needs no script")

    def check(self, script: str) -> str:
        """Empty: this machine runs no scripts."""
        return ""

    def submit(self, script: JobScript, path: Path, lock: int) -> str:
        """ConfigError: this machine has no queue."""
        raise ConfigError("this machine has no queue; train in the foreground")

    def queued(self, scripts: Path, seconds: float) -> list[Job]:
        """Empty: this machine has no queue."""
        return []

    def states(self, ids: Collection[str], users: Collection[int] = (), seconds: float = 10) -> dict[str, Job]:
        """The processes with these ``ids`` that are running."""
        running = [pid for pid in ids if processes.started(int(pid)) is not None]
        return {pid: Job(pid, "RUNNING") for pid in running}

    def stop(self, job: Job, attempt: Mapping[str, Any], seconds: float) -> None:
        """Send the process SIGTERM."""
        processes.send_signal(int(job.id))

    def cancel(self, job: str) -> None:
        """End the process at once by two SIGINT, like a second Ctrl-C, or else kill it."""
        for number, seconds in ((signal.SIGINT, 0.3), (signal.SIGINT, KILL), (signal.SIGKILL, 1.0)):
            processes.send_signal(int(job), number)
            if processes.wait(int(job), seconds):
                return

    def troubles(self, hosts: Sequence[str], seconds: float = 5) -> list[str]:
        """Empty: problems of this machine are unknown."""
        return []
