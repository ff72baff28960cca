"""The state of a run: from its record, from its scheduler, and from the processes of this host."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpclm import files
from hpclm.errors import ExitCode
from hpclm.node import processes
from hpclm.node.job import Job
from hpclm.rundir import events
from hpclm.rundir.lease import is_here
from hpclm.rundir.rows import Row
from hpclm.rundir.runs import Run, is_job
from hpclm.rundir.summary import KILLED

SILENT = 30.0  # seconds without a heartbeat after which a run that cannot be seen from here does not count as running
BY_SCHEDULER = ("TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "REVOKED")
"""States of jobs that the scheduler has ended by itself."""
UNLIMITED = re.compile(r"UNLIMITED|36[45]-")
"""The time left of a job without a limit: early in it, squeue counts down from a year."""


@dataclass(frozen=True)
class State:
    """The state of a run. All commands ask it, and none works it out by itself."""

    run: Run
    name: str
    """waiting, starting, running, completing, done, stopped, exited, cancelled, failed, ended, or unknown; new: never started."""
    job: Job | None
    """The job that is running, otherwise pending, otherwise the last one that its scheduler remembers."""
    asked: str
    """Why the scheduler did not answer; "" if it did."""
    process: int | None
    """PID of the run or its launcher, if it is on this host."""
    ending: str
    """How the last attempt ended; empty while it runs, or if unknown."""
    now: float

    @property
    def live(self) -> bool:
        """Whether a job or process of it is pending or running, as far as is known."""
        return self.name in ("waiting", "starting", "running", "completing")

    @property
    def finished(self) -> str:
        """How it did all that its settings ask for, which may end with stop_at; empty if it did not."""
        over = self.run.attempts and self.run.attempts[-1].ended.get("over")
        if self.name == "done" or (self.name == "stopped" and over):
            return self.ending or self.name
        return ""

    @property
    def diverged(self) -> str:
        """How it ended if it would end so again with the same settings; empty if it would not."""
        diverged = not self.live and self.run.end.get("code") == ExitCode.DIVERGED
        return self.ending or "diverged" if diverged else ""

    @property
    def age(self) -> float | None:
        """Seconds since the last step."""
        when = self.run.summary.get("stepped")
        return None if when is None else max(0.0, self.now - when)

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
        return self.ending if self.ending.startswith(self.name) else f"{self.name}, {self.ending}".removesuffix(", ")

    def where(self) -> str:
        """Which job or process it is."""
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
        """What the user should look at."""
        run = self.run
        out = files.typed(self.run.out)
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
        if run.summary.get("experts"):
            yield run.summary["experts"]
        for sink, cause in events.unsent(run.events).items():
            yield f"{sink} lacks rows of metrics.jsonl ({cause}): hpclm sync {out}"
        if run.bad:
            yield f"{run.bad} bad checkpoint{'s' * (run.bad > 1)} set aside in {files.shown(run.out)}/checkpoints"


StateOf = Callable[[Path], State]
"""Gives the state of the run in a directory, by its scheduler, too."""


def state_of(run: Run, states: Mapping[str, Job] | None, asked: str = "") -> State:
    """The state of ``run`` if its scheduler knows ``states``; None: it did not answer, for the reason ``asked``."""
    mine = [states[job] for job in run.jobs if job in states and run.owns(states[job])] if states else []
    job = max(reversed(mine), key=lambda state: (state.live, state.live and not state.waits), default=None)
    here = None if run.over else process_here(run)
    unanswered = states is None  # it may take a while to exit
    elsewhere = run.holder is not None and not is_here(run.holder)
    if run.attempt.get("job_id") and not unanswered:
        elsewhere = False  # the scheduler knows better than its files
    if run.damage:
        name = "unknown"
        text = run.damage
    elif job and job.live:
        ends = run.over or job.name == "COMPLETING"
        name = "waiting" if job.waits else "completing" if ends else _working(run, job)
        text = ""
    elif here is not None or (elsewhere and run.beat_age is not None and run.beat_age < SILENT):
        name = _working(run, None)
        text = ""
    else:
        name, text = _over(run, unanswered, elsewhere, job)
    told = BY_SCHEDULER if name == "exited" else (*BY_SCHEDULER, "FAILED", "CANCELLED")
    if job and name in ("exited", "failed", "ended") and job.name in told:
        because = f" ({job.reason})" if job.reason not in ("", "None", "NonZeroExitCode") else ""
        text = f"{text}; job {job.id} {job.name}{because}"
    needless = run.over and name == "done"  # whatever the scheduler would have answered
    return State(run, name, job, "" if needless else asked, here, text, time.time())


def _over(run: Run, unanswered: bool, elsewhere: bool, job: Job | None) -> tuple[str, str]:
    """State of a run that does not seem to be running, and how it ended; ``unanswered``: the scheduler did not answer, ``elsewhere``: a
    process that is not visible from here holds the run directory."""
    end = run.end
    by = run.cancelled_by
    text = str(end.get("ending") or end.get("cause") or (f"exit code {end['code']}" if end else ""))
    if not run.trained:
        return _not_trained(run, text, unanswered, job)
    if end.get("state"):
        return end["state"], f"{text}; cancelled by {by}" if by else text
    if not end and not by and (unanswered or elsewhere):
        return "unknown", ""
    if not run.attempt and not end:
        return "new", ""
    if by:
        return "cancelled", f"cancelled by {by}; {text or KILLED}"
    return "ended", text or KILLED


def _not_trained(run: Run, text: str, unanswered: bool, job: Job | None) -> tuple[str, str]:
    """State of a run whose last submission is over and has not trained; ``text``: how that ended, as its processes have recorded it."""
    what = "job" if is_job(run.submissions[-1]) else "start"
    if run.cancelled_by or (job and job.name == "CANCELLED"):
        by = f" by {run.cancelled_by}" if run.cancelled_by else ""
        before = run.attempts[-1].ended if run.attempts else {}
        if before.get("state"):
            return before["state"], f"{before.get('ending')}; its last {what} was cancelled{by} before training started"
        return "cancelled", f"its {what} was cancelled{by} before training started"
    if run.end:
        return "exited" if run.end["code"] == ExitCode.REQUEUE else "failed", text
    if unanswered:
        return "unknown", ""
    if job:
        return "failed", "ended before training started"
    return "ended", f"its {what} ended before training started; nothing says how"


def process_here(run: Run) -> int | None:
    """PID on this host of the run's launcher, otherwise of the run itself; None without one."""
    recorded = list[tuple[Row, int]]()
    for launch in [submission for submission in run.submissions if not is_job(submission)][-1:]:
        if str(launch["job_id"]).isdecimal():
            recorded.append((launch, int(launch["job_id"])))
    if run.attempt.get("pid"):
        recorded.append((run.attempt, run.attempt["pid"]))
    running = (pid for event, pid in recorded if is_here(event) and processes.is_ours(pid, event["time"]))
    if (pid := next(running, None)) or not run.holder or not is_here(run.holder):
        return pid
    holding: int = run.holder["pid"]
    return holding if processes.has_open(holding, (run.out / "lock").resolve()) else None


def job_words(job: Job) -> str:
    """A job in one line."""
    if job.waits:
        when = f", expected to start {job.start}" if re.match(r"\d{4}-", job.start) else ""
        return f"job {job.id} {job.name} ({job.reason}){when}"
    left = "" if UNLIMITED.match(job.left) else f", {job.left} left"
    return f"job {job.id} {job.name}" + (f" for {job.elapsed} on {job.nodelist}{left}" if job.live else "")


def span(seconds: float) -> str:
    """A time in the two largest units that matter: 45 s, 3 min, 2 h 05 min, 3 d 4 h."""
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if seconds < 120:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60:02} min" if days < 2 else f"{days} d {hours % 24} h"


def _working(run: Run, job: Job | None) -> str:
    """starting or running: whether the current attempt has completed a step."""
    began = moment(str(run.attempt.get("time", "")))
    job_began = moment(job.start) if job else None
    if began is None or (job_began is not None and began < job_began - 2):
        return "starting"
    return "starting" if run.summary.get("state") == "starting" else "running"


def moment(text: str) -> float | None:
    """The time that a run's files or squeue give, in seconds since 1970; None for anything else."""
    for form in ("%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S"):
        try:
            return datetime.strptime(text, form).timestamp()
        except (ValueError, OverflowError):
            continue
    return None
