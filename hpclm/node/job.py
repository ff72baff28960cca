"""The job of this process, and jobs as schedulers show them, without code of any one scheduler."""

import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

SHOWN_HOSTS = 8  # hosts in a line of the log
WAITING = frozenset(
    ["PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"]
)
RUNNING = frozenset(["RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT", "COMPLETING"])


@dataclass(frozen=True)
class OwnJob:
    """The job of this process, and requests to its scheduler. Outside a job, ``id`` is empty, and requests do nothing.

    A failed request is only logged, because the process has more important work.
    """

    scheduler: str = ""
    """Name of the scheduler: Slurm, or the class of a user-defined one."""
    id: str = ""
    """The id of this job in the scheduler's commands: 12, or 12_3 for a task of the array 12."""
    restart: int = 0
    """How often the scheduler has restarted the job."""
    array_task: str = ""
    """Its index among the tasks of an array; empty without an array."""
    hosts: tuple[str, ...] = ()
    """The nodes of this start, by their names in the scheduler; empty if unknown."""
    node: str = field(default_factory=socket.gethostname)
    """The node of this process, by its name in the scheduler or else its host name."""
    deadline: float | None = None
    """When the time limit ends the job, in seconds since 1970; None without a limit, or if unknown."""
    asked: Any = field(default=None, compare=False, repr=False)
    """The ``hpclm.launch.schedulers.Scheduler`` of the job."""

    def __str__(self) -> str:
        """The job for the log: job 12 of Slurm, start 2, on node1, node2, until 2026-11-27 14:03."""
        text = f"job {self.id} of {self.scheduler}"
        if self.restart:
            text += f", start {self.restart + 1}"
        if self.hosts:
            text += f", on {', '.join(self.hosts[:SHOWN_HOSTS])}"
        if len(self.hosts) > SHOWN_HOSTS:
            text += f" and {len(self.hosts) - SHOWN_HOSTS} more"
        if self.deadline:
            text += time.strftime(", until %Y-%m-%d %H:%M", time.localtime(self.deadline))
        return text

    def row(self) -> dict[str, str | int]:
        """The job's fields in an event of a run; {} outside a job."""
        return {"job_id": self.id, "restart": self.restart} if self.id else {}

    def requeue(self, without: Sequence[str] = ()) -> bool:
        """Requeue the job, avoiding the nodes ``without``; returns whether it was requeued. This may end the calling process."""
        with self._failures_logged():
            return self.requeue_or_raise(without)
        return False

    def requeue_or_raise(self, without: Sequence[str] = ()) -> bool:
        """Requeue the job like ``requeue``, but raise NoAnswerError if the scheduler does not respond."""
        return bool(self.asked and self.asked.requeue(self, without))

    def requeue_if_abandoned(self) -> str:
        """Requeue the job if its exit code asks for that but nothing else will do it. Returns why this was necessary, or ""."""
        with self._failures_logged():
            why: str = self.asked.abandoned(self) if self.asked else ""
            if why and self.requeue():
                return why
        return ""

    def ending(self, warned: float) -> str:
        """Why the scheduler is ending this start of the job; empty if it is not, or the reason is unknown.

        ``warned``: the longest time between a warning and the time limit, in seconds.
        """
        with self._failures_logged():
            if self.asked:
                return str(self.asked.ending(self, warned))
        return ""

    def end_step(self, code: int) -> None:
        """End the job step of this process, which exits with ``code``. Its parent, the scheduler's process, is dead."""
        with self._failures_logged():
            if self.asked:
                self.asked.end_step(self, code)

    def troubles(self, hosts: Sequence[str], seconds: float = 5.0) -> list[str]:
        """The problems of the nodes ``hosts`` that the scheduler knows."""
        with self._failures_logged():
            if self.asked:
                return list(self.asked.troubles(hosts, seconds))
        return []

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a user-defined scheduler may raise anything
            log.warning("%s: %s", self.scheduler, str(error).partition("\n")[0] or type(error).__name__)


@dataclass(frozen=True)
class Job:
    """A job as its scheduler shows it; the names of states are Slurm's."""

    id: str
    """Job ID; 12_3 for an array task."""
    name: str
    """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, CANCELLED, TIMEOUT, …"""
    elapsed: str = ""
    """Run time, as D-HH:MM:SS."""
    left: str = ""
    """Time until its limit, in the same format."""
    start: str = ""
    """Actual or expected start: YYYY-MM-DDTHH:MM:SS, or N/A."""
    nodes: int = 1
    nodelist: str = ""
    reason: str = ""
    """Why it is pending, or how it ended."""
    script: str = ""
    """Path of its script, as it was submitted; "" if unknown."""
    cluster: str = ""
    """The cluster of the job, if the scheduler has several."""

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason not in ("", "None") else ""
        return f"job {self.id} ({self.name.lower()}{reason})"

    @property
    def live(self) -> bool:
        """Whether it is pending or running."""
        return self.name in WAITING or self.name in RUNNING

    @property
    def waits(self) -> bool:
        """Whether it is pending."""
        return self.name in WAITING
