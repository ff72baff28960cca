"""Schedulers queue jobs, start them on nodes, preempt them and restart them. A file with a subclass of Scheduler adds a new one."""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm.base import registry
from hpclm.node.job import Job, OwnJob

if TYPE_CHECKING:
    from hpclm.config import RunConfig

SCHEDULERS = {"slurm": "hpclm.launch.schedulers.slurm:Slurm", "local": "hpclm.launch.schedulers.here:LocalMachine"}


@dataclass(frozen=True)
class JobScript:
    """A job's script, ready to be submitted."""

    text: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Further data that the scheduler needs to submit the script, in types that JSON has."""


class Scheduler(ABC):
    """The interface of a scheduler. Methods raise NoAnswerError if the scheduler does not answer within ``seconds``."""

    name = ""

    @abstractmethod
    def script(self, run: "RunConfig", path: Path, setup: Sequence[str], command: Sequence[str]) -> JobScript:
        """The script of a job of ``run``; ConfigError if it cannot work. ``path``: the file with the run's settings.

        The script runs the lines of shell ``setup``, and then executes ``command`` in place of the shell.
        """

    @abstractmethod
    def check(self, script: str) -> str:
        """The scheduler's comment on a script, without submitting it; empty without a comment. ConfigError if it refuses the script."""

    @abstractmethod
    def submit(self, script: JobScript, path: Path, lock: int) -> str:
        """Submit the script at ``path``; returns the job's ID, or ID;CLUSTER.

        ``lock``: the descriptor of a lock. The process that submits inherits it (`keep` of ``processes.ask``), and so holds the lock
        even if the calling process is killed. ConfigError if the scheduler refuses the job; another HpclmError if it may be in the queue.
        """

    def on(self, cluster: str) -> "Scheduler":
        """The scheduler for a cluster "a", or for several, "a,b"; for the cluster of this machine if ``cluster`` is empty."""
        return self

    def for_script(self, script: str) -> "Scheduler":
        """The scheduler for the clusters to which it would send the job of ``script``."""
        return self

    @abstractmethod
    def queued(self, scripts: Path, seconds: float) -> list[Job]:
        """The user's pending and running jobs with scripts in the folder ``scripts``, oldest first."""

    @abstractmethod
    def states(self, ids: Collection[str], users: Collection[int] = (), seconds: float = 10) -> dict[str, Job]:
        """The jobs with these ``ids`` that the scheduler still knows, by ID. ``users``: the owners of the jobs."""

    @abstractmethod
    def stop(self, job: Job, attempt: Mapping[str, Any], seconds: float) -> None:
        """Make a job save and exit, and prevent a restart. ``attempt``: host and PID of the run's rank 0, if known."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """End a job at once, and prevent a restart."""

    @abstractmethod
    def troubles(self, hosts: Sequence[str], seconds: float = 5) -> list[str]:
        """A text for each of the nodes ``hosts`` that has a problem."""

    # The processes of a job call the methods below. A scheduler works without them, but its jobs cannot ask for another start.

    def own_job(self, env: Mapping[str, str]) -> OwnJob | None:
        """The job of a process with the variables ``env``; None outside this scheduler's jobs. A process calls it once."""
        return None

    def requeue(self, job: OwnJob, without: Sequence[str] = ()) -> bool:
        """Requeue a running job, avoiding the nodes ``without``; returns whether it was requeued. May end the calling process.

        Returns False, and does nothing, if the job no longer runs, may not be restarted, or cannot avoid these nodes.
        """
        return False

    def abandoned(self, job: OwnJob) -> str:
        """Why the scheduler would not restart a running job, although the exit code asks for a restart; empty if it would."""
        return ""

    def ending(self, job: OwnJob, warned: float) -> str:
        """Why the scheduler is ending this start of a job; empty if it is not, or the reason is unknown.

        ``warned``: the longest time between a warning and the time limit, in seconds.
        """
        return ""

    def end_step(self, job: OwnJob, code: int) -> None:  # noqa: B027  # most schedulers need nothing
        """End the job step of the calling process, which exits with ``code``, because the scheduler's process that started it is dead."""


def current_job(cluster: str = "auto", env: Mapping[str, str] = os.environ) -> OwnJob:
    """The job of this process, by the variables ``env``; an OwnJob without an ID outside a job.

    The user's own scheduler, if ``cluster`` (job.cluster) names one, is asked first. ConfigError if it cannot be loaded.
    """
    names = [*SCHEDULERS]
    if ":" in cluster:
        names.insert(0, cluster)
    for name in names:
        scheduler = scheduler_named(name)
        if isinstance(scheduler, Scheduler):
            job = scheduler.own_job(env)
            if job:
                return replace(job, asked=scheduler)
    return OwnJob()


@cache
def scheduler_named(name: str) -> Scheduler:
    """The scheduler ``name``, or package.module:Name; ConfigError if it is unknown."""
    check = registry.class_check("script", "check", "submit", "queued", "states", "stop", "cancel", "troubles")
    scheduler: Scheduler = registry.lookup("job.cluster", name, SCHEDULERS, check)()
    return scheduler


def of_job(name: str, cluster: str, owner: int) -> Scheduler:
    """The scheduler ``name`` for ``cluster``. ``owner``: the user who owns the job's run.

    Code that another user's run directory names is not loaded. Slurm takes its place.
    """
    scheduler = scheduler_named(name if name in SCHEDULERS or owner == os.getuid() else "slurm")
    return scheduler.on(cluster) if isinstance(scheduler, Scheduler) else scheduler
