"""Schedulers queue jobs, start them on nodes, preempt them and start them again. A new one is one file with a subclass of Scheduler."""

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
    """A job's script."""

    text: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Further data that the scheduler needs to submit it, as JSON can hold them."""


class Scheduler(ABC):
    """A scheduler, as hpclm uses it. Methods raise NoAnswerError if it does not answer within ``seconds``."""

    name = ""

    @abstractmethod
    def script(self, run: "RunConfig", path: Path, setup: Sequence[str], command: Sequence[str]) -> JobScript:
        """The script of a job of ``run``; ConfigError if it cannot work. ``path``: the file with the run's settings.

        It has the lines of shell ``setup`` and ends with ``command``, run by exec.
        """

    @abstractmethod
    def check(self, script: str) -> str:
        """The scheduler's comment on a script, without submitting it; empty without a comment. ConfigError if it refuses the script."""

    @abstractmethod
    def submit(self, script: JobScript, path: Path, lock: int) -> str:
        """Submit the script at ``path``; returns the job's ID, or ID;CLUSTER. ``lock``: the descriptor of a
        lock. The process that submits inherits it (`keep` of ``processes.ask``), and holds it even if this one is killed.

        ConfigError: it was refused; another HpclmError: it may be in the queue.
        """

    def on(self, cluster: str) -> "Scheduler":
        """The scheduler as it is on one of its clusters, or on several, "a,b"; empty: on the one it is called on."""
        return self

    def for_script(self, script: str) -> "Scheduler":
        """The scheduler as it is on the clusters to which it would send the job of ``script``."""
        return self

    @abstractmethod
    def queued(self, scripts: Path, seconds: float) -> list[Job]:
        """The user's pending and running jobs that have their scripts in the folder ``scripts``, oldest first."""

    @abstractmethod
    def states(self, ids: Collection[str], users: Collection[int] = (), seconds: float = 10) -> dict[str, Job]:
        """The jobs with these ``ids`` that it still knows; ``users``: their owners."""

    @abstractmethod
    def stop(self, job: Job, attempt: Mapping[str, Any], seconds: float) -> None:
        """Have a job save and exit, for good. ``attempt``: host and PID of the run's rank 0, if known."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """End a job now, for good."""

    @abstractmethod
    def troubles(self, hosts: Sequence[str], seconds: float = 5) -> list[str]:
        """The problems of those nodes that have one."""

    # For the processes of a job. A scheduler works without these methods, but its jobs cannot ask for another start.

    def own_job(self, env: Mapping[str, str]) -> OwnJob | None:
        """The job of a process with the variables ``env``; None if it is in none of this scheduler. Called once by a process."""
        return None

    def requeue(self, job: OwnJob, without: Sequence[str] = ()) -> bool:
        """Have a running job start again, on other nodes than ``without``; whether it will. This may end the calling process.

        False if the job no longer runs, may not be started again, or cannot leave these nodes out; then nothing is done.
        """
        return False

    def abandoned(self, job: OwnJob) -> str:
        """Why the scheduler would not start a running job again, although its exit code asks for that; empty if it would."""
        return ""

    def ending(self, job: OwnJob, warned: float) -> str:
        """Why the scheduler ends this start of a job; empty if it does not, or does not say.

        ``warned``: the longest time between a warning and the time limit, in seconds.
        """
        return ""

    def end_step(self, job: OwnJob, code: int) -> None:  # noqa: B027  # most need none
        """End what waits for the calling process of a job, which exits with ``code``; the scheduler's process that started it is dead."""


def current_job(cluster: str = "auto", env: Mapping[str, str] = os.environ) -> OwnJob:
    """The job of this process, by the variables ``env``; a job without an ID outside of one.

    A scheduler of the user's, named by ``cluster`` (job.cluster), is asked first. ConfigError if it cannot be loaded.
    """
    names = [cluster, *SCHEDULERS] if ":" in cluster else [*SCHEDULERS]
    for name in names:
        scheduler = scheduler_named(name)
        if isinstance(scheduler, Scheduler) and (job := scheduler.own_job(env)):
            return replace(job, asked=scheduler)
    return OwnJob()


@cache
def scheduler_named(name: str) -> Scheduler:
    """The scheduler ``name``, or package.module:Name; ConfigError for an unknown one."""
    check = registry.class_check("script", "check", "submit", "queued", "states", "stop", "cancel", "troubles")
    scheduler: Scheduler = registry.lookup("job.cluster", name, SCHEDULERS, check)()
    return scheduler


def of_job(name: str, cluster: str, owner: int) -> Scheduler:
    """The scheduler ``name``, on ``cluster``, for a job of a run of the user ``owner``.

    Code that another user's run directory names is not loaded: Slurm is asked then.
    """
    scheduler = scheduler_named(name if name in SCHEDULERS or owner == os.getuid() else "slurm")
    return scheduler.on(cluster) if isinstance(scheduler, Scheduler) else scheduler
