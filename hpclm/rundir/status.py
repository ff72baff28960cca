"""The status of runs: from their directories, from Slurm, and from the processes of this host."""

import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from subprocess import Popen

from hpclm import files
from hpclm.node import processes, slurm
from hpclm.node.processes import NoAnswerError
from hpclm.node.slurm import JobState
from hpclm.rundir import endings
from hpclm.rundir.runs import Run
from hpclm.rundir.summary import ENDED
from hpclm.scheduler import Scheduler, of_run

SILENT = 30.0  # seconds without a heartbeat after which a run that cannot be seen from here does not count as running
ASK = 60.0  # seconds between questions to Slurm of one command, since many people watch many runs
LATE = 15.0  # seconds without a heartbeat, of which there is one every 5 s, after which a run may have ended


@dataclass(frozen=True)
class RunStatus:
    """The status of one run."""

    run: Run
    name: str
    """waiting, starting, running, completing, done, stopped, exited, cancelled, failed, ended, or unknown; new: never started."""
    job: JobState | None
    """The Slurm job that is pending or running, otherwise the last one that Slurm remembers."""
    asked: str
    """Why Slurm did not answer; "" if it did."""
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
    def age(self) -> float | None:
        """Seconds since the last step."""
        when = self.run.summary.get("stepped")
        return None if when is None else max(0.0, self.now - when)

    @property
    def left(self) -> float | None:
        """Estimated seconds until the planned end of a running run; None if unknown."""
        total, seconds = self.run.total, self.run.summary.get("step_seconds")
        if self.name != "running" or total is None or seconds is None:
            return None
        left: float = max(0, total - self.run.step) * seconds
        return left

    def how(self) -> str:
        """The state, and how the last attempt ended."""
        if self.ending.startswith(self.name):
            return self.ending
        return f"{self.name}, {self.ending}" if self.ending else self.name

    def where(self) -> str:
        """Which job or process it is."""
        if self.job and (self.job.live or not self.run.attempt):
            return job_words(self.job)
        if self.process:
            return f"process {self.process} on this host"
        if self.live and self.run.holder:
            holder = self.run.holder
            job = f"job {holder['job']}, " if holder.get("job") else ""
            return f"{job}process {holder.get('pid')} on {holder.get('host')}, according to its files"
        return ""

    def warnings(self) -> list[str]:
        """What the user should look at."""
        return [text for text in self._warnings() if text]

    def _warnings(self) -> Iterator[str]:
        run, out = self.run, files.typed(self.run.out)
        usual, loss = run.summary.get("step_seconds") or 0, run.summary.get("loss", 0.0)
        if self.name == "running" and self.age is not None and self.age > max(120, 20 * usual):
            yield f"no step for {span(self.age)}, and a step takes {usual:.2f} s: hpclm logs {out}"
        if self.live and run.slow:
            ranks = [f"rank {row['rank']} on {row['host']} ({row['times']:.1f} times)" for row in run.slow]
            more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
            yield f"slower than the others: {', '.join(ranks[:8])}{more}"
        if self.job and self.job.hopeless:
            yield f"Slurm can never start job {self.job.id} ({self.job.reason}): hpclm cancel {out}"
        if loss is None:
            yield f"the loss of step {run.step} is not finite"
        elif run.summary.get("spiking_since"):
            yield f"loss spike since step {run.summary['spiking_since']}: hpclm checkpoints {out}"
        yield self._crash_loop(run.summary.get("starts", []))
        if run.bad:
            yield f"{run.bad} bad checkpoint{'s' * (run.bad > 1)} set aside in {files.shown(run.out)}/checkpoints"
        if self.name == "unknown" and run.holder:
            yield (
                f"process {run.holder.get('pid')} on {run.holder.get('host')} has not released the run directory; "
                "whether it is running cannot be seen from here"
            )

    def _crash_loop(self, starts: Sequence[int]) -> str:
        if len(starts) < 3 or len(set(starts)) > 1:
            return ""
        if self.run.step <= starts[0]:
            return f"three attempts from step {starts[0]} without a step"
        return "" if self.live else f"three attempts in a row started at step {starts[0]}: none reached a checkpoint"


class Queue:
    """The status of runs, again and again: Slurm is asked at most every ASK seconds, or when there are new jobs."""

    def __init__(self, seconds: float, squeue: Popen[bytes] | None = None):
        """``seconds``: that Slurm has for an answer; ``squeue``: already asks it."""
        self.seconds, self._squeue = seconds, squeue
        self.silent = ""
        """Why Slurm did not answer; "" if it did."""
        self._states: Mapping[str, JobState] | None = {}
        self._asked = -ASK
        self._known: set[str] = set()

    def statuses(self, runs: Sequence[Run], ask: bool = True) -> list[RunStatus]:
        """How the runs stand now; without ``ask``, by what Slurm said of their jobs the last time."""
        jobs = {job for run in runs for job in run.jobs}
        if (ask and time.monotonic() - self._asked >= ASK) or not jobs <= self._known:
            try:
                self._states, self.silent = self._answer(runs, jobs), ""
            except NoAnswerError as silent:
                self._states, self.silent = None, str(silent)
            self._asked, self._known = time.monotonic(), jobs
        return [status_of(run, self._states if run.jobs else {}, self.silent * bool(run.jobs)) for run in runs]

    def _answer(self, runs: Sequence[Run], jobs: set[str]) -> Mapping[str, JobState]:
        squeue, self._squeue = self._squeue, None
        owners, states = sorted({run.owner for run in runs if run.jobs}), dict[str, JobState]()
        if squeue and not jobs:
            with suppress(NoAnswerError):
                processes.finish(squeue, 0)
        for scheduler in _schedulers(runs) if jobs else ():
            if squeue and scheduler.name == "slurm":
                states |= slurm.read_squeue(squeue, jobs, self.seconds)
            else:
                states |= scheduler.states(jobs, owners, self.seconds)
        return states


def _schedulers(runs: Sequence[Run]) -> list[Scheduler]:
    found = [of_run([each.cluster for each in run.submissions if each.is_job], run.owner) for run in runs]
    return list(dict.fromkeys(each for several in found for each in several))


def query(runs: Sequence[Run], seconds: float, squeue: Popen[bytes] | None = None) -> list[RunStatus]:
    """The status of runs. squeue is asked once for all of them, or was started before, and has ``seconds`` to answer."""
    return Queue(seconds, squeue).statuses(runs)


def status_of(run: Run, states: Mapping[str, JobState] | None, asked: str = "") -> RunStatus:
    """The status of ``run`` if Slurm knows ``states``; None: it did not answer, for the reason ``asked``."""
    mine = [states[job] for job in run.jobs if job in states] if states else []
    live = [job for job in mine if job.live]
    job = (live or mine)[-1] if mine else None
    here = process_here(run)
    beats = run.beat_age is not None and run.beat_age < SILENT and _is_elsewhere(run)
    if live and job:
        name, text = "waiting" if job.waits else "completing" if job.name == "COMPLETING" else _working(run, job), ""
    elif here is not None or (beats and (states is None or not run.attempt.get("job_id"))):
        name, text = _working(run, None), ""
    else:
        name, text = _over(run, states is None, job)
    if job and not job.live and name in ("failed", "ended") and job.name != "COMPLETED":
        because = f" ({job.reason})" if job.reason not in ("", "None", "NonZeroExitCode") else ""
        text = f"{text}; job {job.id} {job.name}{because}"
    return RunStatus(run, name, job, asked, here, text, time.time())


def _over(run: Run, silent: bool, job: JobState | None) -> tuple[str, str]:
    """State of a run that does not seem to be running, and how it ended; ``silent``: Slurm did not answer."""
    name, text = _told(run)
    if not run.trained and not silent:
        log = run.out / run.submissions[-1].log
        terminated = endings.terminated(log)
        wrong = "" if terminated else endings.last_ending(log)[1]
        if not terminated and (wrong or (files.is_file(log) and not (job and job.name == "CANCELLED"))):
            return "failed", wrong or endings.last_fault(log) or "ended before training started"
        if not run.attempts:
            return "cancelled", "its job was cancelled before training started"
        text = f"{text}; its last job was cancelled before training started".removeprefix("; ")
    total, unmeasured = run.total, name in ("failed", "exited", "stopped")
    if total is not None and run.step >= total and not unmeasured:
        return "done", text if name == "done" else f"step {run.step} of {total}"
    if name or silent or (_is_elsewhere(run) and not run.attempt.get("job_id")):
        return name or "unknown", text
    if not run.attempts:
        return ("failed", "ended before training started") if job or run.submissions else ("new", "")
    if run.holder is None:  # it has released the run directory
        return "exited", text or f"exited cleanly after step {run.step}"
    return "ended", text or "ended without a message: killed, or its node failed"


def _told(run: Run) -> tuple[str, str]:
    """How the last attempt ended by its own account, otherwise by the end of its log or its job's; empty if unknown."""
    if run.summary.get("state") in ENDED:
        return run.summary["state"], run.summary["ending"]
    told = endings.last_ending(run.out / "log.txt")
    log = run.job_log() if run.trained and told[0] in ("", "ended") else None
    return (endings.last_ending(log) if log else told) or told


def process_here(run: Run) -> int | None:
    """PID on this host of the run's launcher, otherwise of the run itself; None without one."""
    recorded = [(pid, when) for host, pid, when in run.processes if host == socket.gethostname()]
    running = (pid for pid, when in recorded if processes.is_ours(pid, when))
    holder = run.holder or {}
    pid = holder.get("pid", 0) if holder.get("host") == socket.gethostname() else 0
    return next(running, None) or (pid if pid and processes.has_open(pid, (run.out / "lock").resolve()) else None)


def job_words(job: JobState) -> str:
    """A Slurm job in one line."""
    if job.waits:
        when = f", expected to start {job.start}" if re.match(r"\d{4}-", job.start) else ""
        return f"job {job.id} {job.name} ({job.reason}){when}"
    if job.live:
        return f"job {job.id} {job.name} for {job.elapsed} on {job.nodelist}, {job.left} left"
    return f"job {job.id} {job.name}"


def span(seconds: float) -> str:
    """A time in the two largest units that matter: 45 s, 3 min, 2 h 05 min, 3 d 4 h."""
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if seconds < 120:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60:02} min" if days < 2 else f"{days} d {hours % 24} h"


def _working(run: Run, job: JobState | None) -> str:
    """starting or running: whether the current attempt has completed a step."""
    began, job_began = moment(str(run.attempt.get("time", ""))), moment(job.start) if job else None
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


def _is_elsewhere(run: Run) -> bool:
    """Whether a process of another host, which is not visible from here, holds the run directory."""
    return run.holder is not None and run.holder.get("host") != socket.gethostname()
