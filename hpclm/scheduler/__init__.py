"""Schedulers: what queues jobs, starts them on nodes, and preempts them. A new one is one file with a subclass of Scheduler."""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm import registry
from hpclm.node.slurm import JobState

if TYPE_CHECKING:
    from hpclm.config import RunConfig

SCHEDULERS = {"slurm": "hpclm.scheduler.slurm:Slurm", "local": "hpclm.scheduler.here:LocalMachine"}


@dataclass(frozen=True)
class Queued:
    """A pending or running job of a run directory."""

    job_id: str
    state: str
    reason: str
    script: Path
    cluster: str = ""
    """The cluster that it is on, where the scheduler has several."""

    def __str__(self) -> str:
        return f"job {self.job_id} ({self.state.lower()}{f': {self.reason}' * (self.reason != 'None')})"


class Scheduler(ABC):
    """What hpclm asks of a scheduler. NoAnswerError: it does not answer, or not within ``seconds``."""

    name = ""

    @abstractmethod
    def script(self, run: "RunConfig", path: Path, setup: Sequence[str]) -> str:
        """The script of the job that trains with the settings at ``path`` after the lines of shell ``setup``; ConfigError if
        it cannot work."""

    @abstractmethod
    def check(self, script: str) -> str:
        """The scheduler's own opinion of a script, without submitting it; empty without one. ConfigError if it refuses it."""

    @abstractmethod
    def submit(self, script: Path, lock: Path) -> str:
        """Submit the script, and give the job's ID, or ID;CLUSTER. ``lock`` stays locked until that has ended, even if this process is killed.

        ConfigError: it was refused, or can never start and was cancelled; another HpclmError: it may be in the queue.
        """

    def on(self, cluster: str) -> "Scheduler":
        """The scheduler as it is on one of its clusters, or on several, "a,b"; empty: on the one it is called on."""
        return self

    def for_script(self, script: str) -> "Scheduler":
        """The scheduler as it is on the clusters to which it would send the job of ``script``."""
        return self

    @abstractmethod
    def queued(self, scripts: Path, seconds: float) -> list[Queued]:
        """The user's pending and running jobs whose scripts are in the folder ``scripts``, oldest first."""

    @abstractmethod
    def states(self, ids: Collection[str], users: Collection[int] = (), seconds: float = 10) -> dict[str, JobState]:
        """The jobs among ``ids`` that it still knows; ``users``: their owners."""

    @abstractmethod
    def stop(self, job: JobState, attempt: Mapping[str, Any], seconds: float) -> None:
        """Have a job save and exit, for good. ``attempt``: host and PID of the run's rank 0, if known."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """End a job now, for good."""

    @abstractmethod
    def troubles(self, hosts: Sequence[str], seconds: float = 5) -> list[str]:
        """The problems of those nodes that have one."""


@cache
def named(name: str) -> Scheduler:
    """The scheduler ``name``, or package.module:Name; ConfigError if there is none."""
    check = registry.class_check("script", "check", "submit", "queued", "states", "stop", "cancel", "troubles")
    scheduler: Scheduler = registry.lookup("job.cluster", name, SCHEDULERS, check)()
    return scheduler


def of_job(name: str, cluster: str, owner: int) -> Scheduler:
    """The scheduler called ``name``, on ``cluster``, of a job of a run that belongs to the user ``owner``.

    Code that the run directory of another user names is not loaded: Slurm is asked then.
    """
    scheduler = named(name if name in SCHEDULERS or owner == os.getuid() else "slurm")
    return scheduler.on(cluster) if isinstance(scheduler, Scheduler) else scheduler
