"""The state of a run, from its record, its scheduler, and the processes of this host."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import ExitCode
from hpclm.base.terminal import many
from hpclm.node import processes
from hpclm.node.job import Job
from hpclm.rundir import events
from hpclm.rundir.lease import is_here
from hpclm.rundir.rows import Row
from hpclm.rundir.runs import RunFacts, is_job
from hpclm.rundir.summary import KILLED

SILENT = 30.0  # seconds without a heartbeat after which a run that cannot be seen from here does not count as running
BY_SCHEDULER = ("TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "REVOKED")
"""States of jobs that the scheduler ended."""
UNLIMITED = re.compile(r"UNLIMITED|36[45]-")
"""The time left, as squeue shows it, of a job without a limit. Shortly after the start, that may be a year or almost a year."""


@dataclass(frozen=True)
class State:
    """The state of a run, for all commands."""

    run: RunFacts
    name: str
    """waiting, starting, running, completing, done, stopped, exited, cancelled, failed, ended, or unknown; new: never started."""
    job: Job | None
    """Its running job, otherwise its pending job, otherwise the last job that its scheduler remembers."""
    asked: str
    """Why the scheduler did not answer; "" if it did."""
    process: int | None
    """PID of the run or its launcher, if it is on this host."""
    ending: str
    """How the last attempt ended; empty while it runs, or if unknown."""
    now: float

    @property
    def live(self) -> bool:
        """Whether a job or process of the run is pending or running."""
        return self.name in ("waiting", "starting", "running", "completing")

    @property
    def finished(self) -> str:
        """How it ended, if it has done everything that its settings, such as stop_at, ask for; empty otherwise."""
        over = self.run.attempts and self.run.attempts[-1].ended.get("over")
        if self.name == "done" or (self.name == "stopped" and over):
            return self.ending or self.name
        return ""

    @property
    def diverged(self) -> str:
        """How it diverged; the same settings would diverge again. Empty if it did not."""
        if self.live or self.run.end.get("code") != ExitCode.DIVERGED:
            return ""
        return self.ending or "diverged"

    @property
    def age(self) -> float | None:
        """Seconds since the last step."""
        if self.run.summary.get("stepped") is None:
            return None
        return max(0.0, self.now - self.run.summary["stepped"])

    @property
    def left(self) -> float | None:
        """Estimated seconds until the planned end of a running run; None if unknown."""
        total = self.run.total
        seconds = self.run.summary.get("step_seconds")
        if self.name != "running" or total is None or seconds is None:
            return None
        left: float = max(0, total - self.run.step) * seconds
        return left

    def how(self) -> str:
        """The state, and how the last attempt ended."""
        if self.ending.startswith(self.name):
            return self.ending
        return f"{self.name}, {self.ending}".removesuffix(", ")

    def where(self) -> str:
        """The job or process of the run, in words; empty if unknown."""
        if self.job and (self.job.live or not self.run.attempt):
            return job_words(self.job)
        if self.process:
            return f"process {self.process} on this host"
        holder = self.run.holder
        if holder and (self.live or self.name == "unknown"):
            job = f"job {holder['job']}, " if holder.get("job") else ""
            return f"{job}process {holder.get('pid')} on {holder.get('host')}, according to its files"
        return ""

    def warnings(self) -> Iterator[str]:
        """Sentences on problems that the user should look at."""
        run = self.run
        out = files.typed(run.out)
        usual = run.summary.get("step_seconds") or 0
        if self.name == "running" and self.age is not None and self.age > max(120, 20 * usual):
            yield f"no step for {span(self.age)}, and a step takes {usual:.2f} s: hpclm logs {out}"
        if self.live and run.slow:
            ranks = [f"rank {row['rank']} on {row['host']} ({row['times']:.1f}x the median)" for row in run.slow]
            more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
            yield f"slower than the others: {', '.join(ranks[:8])}{more}"
        if run.summary.get("spiking_since"):
            healthy = f": hpclm checkpoints {out}" if run.checkpoint else ""
            yield f"loss spike since step {run.summary['spiking_since']}{healthy}"
        for sink, cause in events.unsent(run.events).items():
            yield f"{sink} lacks rows of metrics.jsonl ({cause}): hpclm sync {out}"
        if run.bad:
            yield f"{many(run.bad, 'bad checkpoint')} set aside in {files.shown(run.out)}/checkpoints"


StateOf = Callable[[Path], State]
"""Returns the state of the run in a directory, after asking its scheduler too."""


def state_of(run: RunFacts, states: Mapping[str, Job] | None, asked: str = "") -> State:
    """The state of ``run``. ``states``: the jobs that its scheduler shows; None if it did not answer, for the reason ``asked``."""
    job = _last_job(run, states or {})
    process = None
    if not run.over:  # a run that is over may take a while to exit
        process = process_here(run)
    # the scheduler knows better than the files whether a job still holds the run directory
    in_job = run.attempt.get("job_id") and states is not None
    elsewhere = run.holder is not None and not is_here(run.holder) and not in_job
    beats = elsewhere and run.beat_age is not None and run.beat_age < SILENT
    ending = ""
    if run.damage:
        name = "unknown"
        ending = run.damage
    elif job and job.live:
        name = _live(run, job)
    elif process is not None or beats:
        name = _working(run, None)
    else:
        if run.trained:
            name, ending = _over(run, states is None or elsewhere)
        else:
            name, ending = _not_trained(run, states is None, job)
        if job and _explains(job, name):
            ending += f"; job {job.id} {job.name}"
            if job.reason not in ("", "None", "NonZeroExitCode"):
                ending += f" ({job.reason})"
    if run.over and name == "done":  # the scheduler's answer would change nothing
        asked = ""
    return State(run, name, job, asked, process, ending, time.time())


def _last_job(run: RunFacts, states: Mapping[str, Job]) -> Job | None:
    """The run's running job, otherwise its pending job, otherwise its last job."""
    mine = [states[job] for job in run.jobs if job in states and run.owns(states[job])]
    return max(reversed(mine), key=lambda job: (job.live, job.live and not job.waits), default=None)


def _live(run: RunFacts, job: Job) -> str:
    """The state of a run with a pending or running job."""
    if job.waits:
        return "waiting"
    if run.over or job.name == "COMPLETING":
        return "completing"
    return _working(run, job)


def _working(run: RunFacts, job: Job | None) -> str:
    """running if the current attempt has completed a step, otherwise starting."""
    began = moment(str(run.attempt.get("time", "")))
    if began is None or run.summary.get("state") == "starting":
        return "starting"
    job_began = moment(job.start) if job else None
    if job_began is not None and began < job_began - 2:  # the attempt belongs to an earlier start
        return "starting"
    return "running"


def _explains(job: Job, name: str) -> bool:
    """Whether the job's end says more than ``name``, the state according to the run's own record."""
    if name == "exited":
        return job.name in BY_SCHEDULER
    return name in ("failed", "ended") and job.name in (*BY_SCHEDULER, "FAILED", "CANCELLED")


def _recorded(run: RunFacts) -> str:
    """How the last start ended, in the words of its record; empty without a record."""
    end = run.end
    return str(end.get("ending") or end.get("cause") or (end and f"exit code {end['code']}") or "")


def _over(run: RunFacts, unseen: bool) -> tuple[str, str]:
    """The state of a run that has trained and does not seem to be running, and how it ended.

    ``unseen``: it may be running where this process cannot see it.
    """
    text = _recorded(run)
    by = run.cancelled_by
    state = events.state_of(run.end)
    if state:
        return state, f"{text}; cancelled by {by}" if by else text
    if by:
        return "cancelled", f"cancelled by {by}; {text or KILLED}"
    if not run.end and unseen:
        return "unknown", ""
    if not run.end and not run.attempt:
        return "new", ""
    return "ended", text or KILLED


def _not_trained(run: RunFacts, unanswered: bool, job: Job | None) -> tuple[str, str]:
    """The state of a run after its last submission ended before training started, and how it ended."""
    start = "job" if is_job(run.submissions[-1]) else "start"
    if run.cancelled_by or (job and job.name == "CANCELLED"):
        by = f" by {run.cancelled_by}" if run.cancelled_by else ""
        before = run.attempts[-1].ended if run.attempts else {}
        state = events.state_of(before)
        if state:
            return state, f"{before.get('ending')}; its last {start} was cancelled{by} before training started"
        return "cancelled", f"its {start} was cancelled{by} before training started"
    if run.end:
        return "exited" if run.end["code"] == ExitCode.REQUEUE else "failed", _recorded(run)
    if unanswered:
        return "unknown", ""
    if job:
        return "failed", "ended before training started"
    return "ended", f"its {start} ended before training started; nothing says how"


def process_here(run: RunFacts) -> int | None:
    """PID on this host of the run's launcher, otherwise of the run itself; None if neither is on this host."""
    recorded = list[tuple[Row, int]]()
    for launch in run.submissions[-1:]:
        if not is_job(launch) and str(launch["job_id"]).isdecimal():
            recorded.append((launch, int(launch["job_id"])))
    if run.attempt.get("pid"):
        recorded.append((run.attempt, run.attempt["pid"]))
    for event, pid in recorded:
        if is_here(event) and processes.is_ours(pid, event["time"]):
            return pid
    if run.holder and is_here(run.holder):
        pid = run.holder["pid"]
        if processes.has_open(pid, (run.out / "lock").resolve()):
            return pid
    return None


def job_words(job: Job) -> str:
    """A job in one line."""
    text = f"job {job.id} {job.name}"
    if job.waits:
        when = f", expected to start {job.start}" if re.match(r"\d{4}-", job.start) else ""
        return f"{text} ({job.reason}){when}"
    if job.live:
        text += f" for {job.elapsed} on {job.nodelist}"
        if not UNLIMITED.match(job.left):
            text += f", {job.left} left"
    return text


def span(seconds: float) -> str:
    """A time in its two largest units, without small ones that do not matter: 45 s, 3 min, 2 h 05 min, 3 d 4 h."""
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if seconds < 120:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    if days < 2:
        return f"{hours} h {minutes % 60:02} min"
    return f"{days} d {hours % 24} h"


def moment(text: str) -> float | None:
    """A time from a run's files or from squeue, in seconds since 1970; None if ``text`` is not a time."""
    for form in ("%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S"):
        try:
            return datetime.strptime(text, form).timestamp()
        except (ValueError, OverflowError):
            continue
    return None
