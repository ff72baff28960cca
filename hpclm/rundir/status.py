"""The status of runs: from their directories, from Slurm, and from the processes of this host."""

import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from subprocess import Popen

from hpclm import files
from hpclm.node import processes, slurm
from hpclm.node.processes import Locks, NoAnswerError
from hpclm.node.slurm import State
from hpclm.rundir.runs import Run

RECENTLY = 30  # seconds since the last step within which a run counts as running
ASK = 60.0  # seconds between questions to Slurm of one command, since many people watch many runs
LATE = 15.0  # seconds without a heartbeat, of which there is one every 5 s, after which a run may have ended
RECENT = 50  # steps that speed is averaged over


@dataclass(frozen=True)
class RunStatus:
    """The status of one run."""

    run: Run
    name: str
    """waiting, starting, running, completing, done, stopped, exited, failed, ended, or unknown; new: never started."""
    job: State | None
    """The Slurm job that is pending or running, otherwise the last one that Slurm remembers."""
    asked: str
    """Why Slurm did not answer; "" if it did."""
    process: int | None
    """PID of the run or its launcher, if it is on this host."""
    ending: str
    """How the last attempt ended, from its log."""
    total: int | None
    now: float

    @property
    def live(self) -> bool:
        """Whether a job or process of it is pending or running, as far as is known."""
        return self.name in ("waiting", "starting", "running", "completing")

    @property
    def age(self) -> float | None:
        """Seconds since the last line of metrics.jsonl."""
        return None if self.run.stepped is None else max(0.0, self.now - self.run.stepped)

    @property
    def step_seconds(self) -> float | None:
        """Seconds a step takes, over the last steps."""
        return _mean(self.run, "step_seconds")

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second, over the last steps."""
        return _mean(self.run, "tokens_per_second")

    @property
    def left(self) -> float | None:
        """Estimated seconds until the planned end; None if unknown."""
        seconds = self.step_seconds
        return None if self.total is None or seconds is None else max(0, self.total - self.run.step) * seconds

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
        if self.name == "running":
            attempt = self.run.attempt
            job = f"job {attempt['job_id']}, " if attempt.get("job_id") else ""
            return f"{job}process {attempt.get('pid')} on {attempt.get('host')}, according to its files"
        return ""

    def warnings(self) -> list[str]:
        """What the user should look at."""
        found = []
        usual = self.step_seconds or 0
        if self.name == "running" and self.age is not None and self.age > max(120, 20 * usual):
            found.append(
                f"no step for {span(self.age)}, and a step takes {usual:.2f} s: hpclm logs {files.typed(self.run.out)}"
            )
        if self.live and self.run.slow:
            ranks = [f"rank {each['rank']} on {each['host']} ({each['times']:.1f} times)" for each in self.run.slow]
            more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
            found.append(f"slower than the others: {', '.join(ranks[:8])}{more}")
        if self.job and self.job.hopeless:
            found.append(
                f"Slurm can never start job {self.job.id} ({self.job.reason}): hpclm cancel {files.typed(self.run.out)}"
            )
        steps = self.run.steps
        if steps and steps[-1]["loss"] is None:
            found.append(f"the loss of step {steps[-1]['step']} is not finite")
        elif steps and steps[-1].get("spiking_since"):
            found.append(
                f"loss spike since step {steps[-1]['spiking_since']}: hpclm checkpoints {files.typed(self.run.out)}"
            )
        starts = [each.get("from_step") for each in self.run.attempts[-3:]]
        if len(starts) == 3 and len(set(starts)) == 1 and self.run.step <= (starts[0] or 0):
            found.append(f"three attempts from step {starts[0]} without a step")
        elif len(starts) == 3 and len(set(starts)) == 1 and not self.live:
            found.append(f"three attempts in a row started at step {starts[0]}: none reached a checkpoint")
        if self.run.bad:
            found.append(
                f"{self.run.bad} bad checkpoint{'s' * (self.run.bad > 1)} set aside in {files.shown(self.run.out)}/checkpoints"
            )
        if self.name == "unknown" and self.run.holder:
            found.append(
                f"process {self.run.holder.get('pid')} on {self.run.holder.get('host')} has not released the run directory; "
                "whether it is running cannot be seen from here"
            )
        return found


class Queue:
    """The status of runs, again and again: Slurm is asked at most every ASK seconds, or when there are new jobs."""

    def __init__(self, seconds: float):
        """``seconds``: that Slurm has for an answer."""
        self.seconds = seconds
        self.silent = ""
        """Why Slurm did not answer; "" if it did."""
        self._states: Mapping[str, State] | None = {}
        self._asked = -ASK
        self._known: set[str] = set()

    def statuses(self, runs: Sequence[Run], ask: bool = True) -> list[RunStatus]:
        """How the runs stand now; without ``ask``, by what Slurm said of their jobs the last time."""
        jobs = {job for run in runs for job in run.jobs}
        if (ask and time.monotonic() - self._asked >= ASK) or not jobs <= self._known:
            self._states, self.silent = ask_slurm(runs, self.seconds)
            self._asked, self._known = time.monotonic(), jobs
        return all_statuses(runs, self._states, self.silent)


def query(runs: Sequence[Run], seconds: float, asked_before: Popen[bytes] | None = None) -> list[RunStatus]:
    """The status of runs. squeue is asked once for all of them, or was started before, and has ``seconds`` to answer."""
    states, asked = ask_slurm(runs, seconds, asked_before)
    return all_statuses(runs, states, asked)


def ask_slurm(
    runs: Sequence[Run], seconds: float, asked_before: Popen[bytes] | None = None
) -> tuple[Mapping[str, State] | None, str]:
    """What Slurm knows of the jobs of ``runs``, as ``query`` asks it; None, and why, where it does not answer."""
    jobs = {job for run in runs for job in run.jobs}
    try:
        if jobs and asked_before:
            return slurm.read_squeue(asked_before, jobs, seconds), ""
        if jobs:
            return slurm.states(jobs, sorted({run.owner for run in runs if run.jobs}), seconds), ""
    except NoAnswerError as silent:
        return None, str(silent)
    if asked_before:
        with suppress(NoAnswerError):
            processes.finish(asked_before, 0)
    return {}, ""


def all_statuses(runs: Sequence[Run], states: Mapping[str, State] | None, asked: str) -> list[RunStatus]:
    """The status of runs, given what ``ask_slurm`` returned."""
    locks = processes.locks()
    return [status_of(run, states, asked if run.jobs else "", locks) for run in runs]


def status_of(run: Run, states: Mapping[str, State] | None, asked: str = "", locks: Locks | None = None) -> RunStatus:
    """The status of ``run`` if Slurm knows ``states``; None: it did not answer, for the reason ``asked``."""
    mine = [states[job] for job in run.jobs if job in states] if states else []
    live = [job for job in mine if job.live]
    job = (live or mine)[-1] if mine else None
    total, now = run.total, time.time()
    here = process_here(run, locks)
    fresh = run.stepped is not None and now - run.stepped < RECENTLY and _is_elsewhere(run)
    if live and job:
        name, words = "waiting" if job.waits else "completing" if job.name == "COMPLETING" else _working(run, job), ""
    elif here is not None:
        name, words = _working(run, None), ""
    elif fresh and (states is None or not run.attempt.get("job_id")):
        name, words = "running", ""
    else:
        name, words = _over(run, states is None, total, job)
    if job and not job.live and name in ("failed", "ended") and job.name != "COMPLETED":
        because = f" ({job.reason})" if job.reason not in ("", "None", "NonZeroExitCode") else ""
        words = f"{words}; job {job.id} {job.name}{because}"
    return RunStatus(run, name, job, asked, here, words, total, now)


def _over(run: Run, silent: bool, total: int | None, job: State | None) -> tuple[str, str]:
    """State of a run that does not seem to be running, and how it ended; ``silent``: Slurm did not answer."""
    kind, words = run.ended
    if run.unbegun and not silent:
        job_cancelled = not run.unbegun.printed or bool(job and job.name == "CANCELLED")
        cancelled = run.unbegun.told or (not run.unbegun.words and job_cancelled)
        if not cancelled:
            return "failed", run.unbegun.words or run.unbegun.fault or "ended before training started"
        if not run.attempts:
            return "cancelled", "its job was cancelled before training started"
        words = f"{words}; its last job was cancelled before training started".removeprefix("; ")
    if total is not None and run.step >= total and kind not in ("failed", "exited", "stopped"):  # not measured yet
        return "done", words if kind == "done" else f"step {run.step} of {total}"
    if kind or silent or (_is_elsewhere(run) and not run.attempt.get("job_id")):
        return kind or "unknown", words
    if not run.attempts:
        return ("failed", "ended before training started") if job or run.submissions else ("new", "")
    if run.holder is None:  # it has released the run directory
        return "exited", words or f"exited cleanly after step {run.step}"
    return "ended", words or "ended without a message: killed, or its node failed"


def process_here(run: Run, locks: Locks | None = None) -> int | None:
    """PID on this host of the run's launcher, otherwise of the run itself; None without one."""
    mine = [(pid, when) for host, pid, when in run.processes if host == socket.gethostname()]
    found = next((pid for pid, when in mine if processes.is_ours(pid, when)), None)
    if found is not None:
        return found
    return next((pid for pid in processes.lock_holders(f"{run.out}/lock", locks) or [] if pid > 0), None)


def job_words(job: State) -> str:
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


def _working(run: Run, job: State | None) -> str:
    """starting or running: whether the current attempt has completed a step."""
    when = moment(str(run.attempt.get("time", "")))
    began = moment(job.start) if job else None
    if when is None or (began is not None and when < began - 2):
        return "starting"
    steps = run.stepped is not None and run.stepped >= when - 1 and run.step > (run.attempt.get("from_step") or 0)
    return "running" if steps else "starting"


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


def _mean(run: Run, key: str) -> float | None:
    values = [row[key] for row in run.steps[-RECENT:] if isinstance(row.get(key), (int, float))]
    return sum(values) / len(values) if values else None
