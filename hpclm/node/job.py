"""The job that this process is part of, and jobs as their schedulers show them; no scheduler is known here."""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

SHOWN_HOSTS = 8  # in a line of the log
WAITING = frozenset(
    ["PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"]
)
RUNNING = frozenset(["RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT", "COMPLETING"])


@dataclass(frozen=True)
class JobIdentity:
    """A job as its own processes know it; made once, when a process starts."""

    scheduler: str
    """What people call the scheduler: Slurm, or the name of a class of the user's own."""
    id: str
    """What the scheduler's commands call this job and nothing but it: 12, or 12_3 for a task of the array 12."""
    restart: int = 0
    """How often the scheduler has started it again."""
    array_task: str = ""
    """Its index among the tasks of an array; empty without one."""
    hosts: tuple[str, ...] = ()
    """The nodes it has in this start, by their names in the scheduler; empty if unknown."""
    node: str = ""
    """The node of this process, by its name in the scheduler; empty if unknown."""
    deadline: float | None = None
    """When its time limit ends it, in seconds since 1970; None without a limit, or if unknown."""

    def __str__(self) -> str:
        """As the log names it: job 12 of Slurm, start 2, on node1, node2, until 2026-11-27 14:03."""
        start = f", start {self.restart + 1}" if self.restart else ""
        nodes = f", on {', '.join(self.hosts[:SHOWN_HOSTS])}" if self.hosts else ""
        more = f" and {len(self.hosts) - SHOWN_HOSTS} more" if len(self.hosts) > SHOWN_HOSTS else ""
        until = time.strftime(", until %Y-%m-%d %H:%M", time.localtime(self.deadline)) if self.deadline else ""
        return f"job {self.id} of {self.scheduler}{start}{nodes}{more}{until}"


class Job:
    """The job of this process, and what may be asked of its scheduler. This one has none to ask; ``hpclm.launch.schedulers`` makes
    those that have."""

    def __init__(self, identity: JobIdentity | None = None):
        """``identity``: None outside a job."""
        self.identity = identity

    @property
    def node(self) -> str:
        """This machine, by its name in the scheduler, otherwise by its host name."""
        return (self.identity and self.identity.node) or socket.gethostname()

    @property
    def scheduler(self) -> str:
        """What people call its scheduler; empty outside a job."""
        return self.identity.scheduler if self.identity else ""

    def row(self) -> dict[str, str | int]:
        """What the files of a run record of the job; {} outside one."""
        return {"job_id": self.identity.id, "restart": self.identity.restart} if self.identity else {}

    def requeue(self, without: Sequence[str] = ()) -> bool:
        """Have the job start again, on other nodes than ``without``; whether it will. This may end the calling process."""
        return False

    def requeue_or_raise(self) -> bool:
        """As ``requeue``; NoAnswerError if the scheduler does not answer."""
        return False

    def requeue_if_abandoned(self) -> str:
        """Requeue the job if nothing else will, although its exit code asks for that; why that was necessary, or empty."""
        return ""

    def ending(self, warned: float) -> str:
        """Why the scheduler ends this start of the job; empty if it does not, or does not say. ``warned``: the most seconds by which a
        warning comes before the time limit."""
        return ""

    def end_step(self, code: int) -> None:
        """End what waits for this process, which exits with ``code``: the scheduler's own process that started it is dead."""

    def troubles(self, hosts: Sequence[str], seconds: float = 5.0) -> list[str]:
        """The problems of those nodes that have one, as the scheduler knows them."""
        return []


@dataclass(frozen=True)
class JobState:
    """A job as its scheduler shows it; the names of states are Slurm's."""

    id: str
    """Job ID; of an array task 12_3."""
    name: str
    """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, CANCELLED, TIMEOUT, …"""
    elapsed: str
    """Run time, as D-HH:MM:SS."""
    left: str
    """Time until its limit, in the same format."""
    start: str
    """Actual or expected start: YYYY-MM-DDTHH:MM:SS, or N/A."""
    nodes: int
    nodelist: str
    reason: str
    """Why it is pending, or how it ended."""
    script: str = ""
    """Path of its script, as it was submitted; "" if unknown."""

    @property
    def live(self) -> bool:
        """Whether it is pending or running."""
        return self.name in WAITING or self.name in RUNNING

    @property
    def waits(self) -> bool:
        """Whether it is pending."""
        return self.name in WAITING
