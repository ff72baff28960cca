"""How a run stands: what its directory says, what Slurm says of its jobs, and which process of this host it is."""

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpclm.cluster import process, slurm
from hpclm.cluster.slurm import Silent, State
from hpclm.job.rows import tail
from hpclm.job.runs import Run

LATELY = 30  # seconds: a step that recent is a sign of life
RECENT = 50  # steps that speed is averaged over

# What the lines of a run's log, or of its job's, say of its end: the first that is found from the end upwards.
ENDS = (
    ("done", re.compile(r"\b(done at step \d+.*?samples)")),
    ("stopped", re.compile(r"\b(stopped at step \d+ as \w+ says)")),
    ("left", re.compile(r"\b(\w+: (?:saved at step \d+|nothing saved) and leaving)")),
    ("failed", re.compile(r"\b(DUE TO (?:NODE FAILURE|NODE_FAIL).*?)(?: \*\*\*|$)")),
    ("ended", re.compile(r"\b(CANCELLED AT \S+ DUE TO .*?|CANCELLED AT \S+)(?: \*\*\*|$)")),
    ("failed", re.compile(r"^[-\d]* ?[\d:,]* E (.*)$")),
    ("failed", re.compile(r"^error: (.*)$")),
)
STEPS = re.compile(r" I step \d+/?\d*  loss ")
TRACE = "Traceback (most recent call last):"
BEGINS = re.compile(r" run directory .*(goes on from step \d+|a new run)$")


@dataclass(frozen=True)
class Standing:
    """How one run stands."""

    run: Run
    name: str
    """waiting, starting, running, leaving, done, stopped, left, failed, ended, or unknown; new: never started."""
    job: State | None
    """The job of Slurm that waits or runs, else the last one that Slurm remembers."""
    asked: str
    """What Slurm answered: "", or why it is not known."""
    process: int | None
    """The process of this host that runs or launches it."""
    ending: str
    """How the last attempt ended, in the words of its log."""
    total: int | None
    now: float

    @property
    def live(self) -> bool:
        """Whether something of it waits or runs, as far as is known."""
        return self.name in ("waiting", "starting", "running", "leaving")

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
        """Seconds of training until the planned end; None where it is not known."""
        seconds = self.step_seconds
        return None if self.total is None or seconds is None else max(0, self.total - self.run.step) * seconds

    def where(self) -> str:
        """Which job or process it is, in words."""
        if self.job and (self.job.live or not self.run.attempt):
            return job_words(self.job)
        if self.process:
            return f"process {self.process} on this host"
        if self.name == "running":
            attempt = self.run.attempt
            job = f"job {attempt['job_id']}, " if attempt.get("job_id") else ""
            return f"{job}process {attempt.get('pid')} on {attempt.get('host')}, as its own files say"
        return ""

    def warnings(self) -> list[str]:
        """What a person should look at."""
        found = []
        usual = self.step_seconds or 0
        if self.name == "running" and self.age is not None and self.age > max(120, 20 * usual):
            found.append(
                f"no step for {span(self.age)}, and a step takes {usual:.2f} s: hpclm logs {shlex.quote(str(self.run.out))}"
            )
        if self.live and self.run.slow:
            named = [f"rank {each['rank']} on {each['host']} ({each['times']:.1f} times)" for each in self.run.slow]
            more = f" and {len(named) - 8} more" if len(named) > 8 else ""
            found.append(f"slower than the others: {', '.join(named[:8])}{more}")
        steps = self.run.steps
        if steps and steps[-1]["loss"] is None:
            found.append(f"the loss of step {steps[-1]['step']} is not finite")
        starts = [each.get("from_step") for each in self.run.attempts[-3:]]
        if len(starts) == 3 and len(set(starts)) == 1 and self.run.step <= (starts[0] or 0):
            found.append(f"three attempts from step {starts[0]} without a step")
        elif len(starts) == 3 and len(set(starts)) == 1 and not self.live:
            found.append(f"three attempts in a row began at step {starts[0]}: none lived to a checkpoint")
        if self.run.bad:
            found.append(
                f"{self.run.bad} bad checkpoint{'s' * (self.run.bad > 1)} set aside in {self.run.out}/checkpoints"
            )
        if self.name == "unknown" and self.run.holder:
            found.append(
                f"process {self.run.holder.get('pid')} on {self.run.holder.get('host')} has not signed off; it cannot be "
                "seen from here whether it lives"
            )
        return found


def look(runs: Sequence[Run], seconds: float) -> list[Standing]:
    """How runs stand. Slurm is asked once for all of them, and is given ``seconds``."""
    states: Mapping[str, State] | None
    states, asked = {}, ""
    jobs = {job for run in runs for job in run.jobs}
    if jobs:
        try:
            states = slurm.states(jobs, _owners(runs), seconds)
        except Silent as silent:
            states, asked = None, str(silent)
    return [stand(run, states, asked if run.jobs else "") for run in runs]


def stand(run: Run, states: Mapping[str, State] | None, asked: str = "") -> Standing:
    """How ``run`` stands when Slurm knows ``states``; None: it did not say, for the reason ``asked``."""
    mine = [states[job] for job in run.jobs if job in states] if states else []
    live = [job for job in mine if job.live]
    job = (live or mine)[-1] if mine else None
    total, now = run.total(), time.time()
    here = process_here(run)
    kind, words = last_words(run)
    fresh = run.stepped is not None and now - run.stepped < LATELY and _far(run)
    if live and job:
        name = "waiting" if job.waits else "leaving" if job.name == "COMPLETING" else _working(run, job)
    elif here is not None:
        name = _working(run, None)
    elif fresh and (states is None or not run.attempt.get("job_id")):
        name = "running"
    elif total is not None and run.step >= total:
        name, words = "done", words if kind == "done" else f"step {run.step} of {total}"
    elif states is None or (_far(run) and not run.attempt.get("job_id")):
        name = kind or "unknown"
    elif kind:
        name = kind
    elif not run.attempts:
        name, words = ("failed", "ended before training began") if job or run.submissions else ("new", "")
    elif run.holder is None:  # it took its name out of the lock
        name, words = "left", f"left in good order after step {run.step}"
    else:
        name, words = "ended", "ended without a word: killed, or its node failed"
    if job and not job.live and name in ("failed", "ended") and job.name != "COMPLETED":
        because = f" ({job.reason})" if job.reason not in ("", "None") else ""
        words = f"{words}; job {job.id} {job.name}{because}"
    return Standing(run, name, job, asked, here, words, total, now)


def process_here(run: Run) -> int | None:
    """The process of this host that launched or is the run, the launching one first; None when there is none."""
    mine = [(pid, when) for host, pid, when in run.processes if host == process.host()]
    found = [pid for pid, when in mine if process.is_ours(pid, when)]
    return next(iter(found + [pid for pid in process.holders(run.out / "lock") or [] if pid > 0]), None)


def last_words(run: Run) -> tuple[str, str]:
    """How the last attempt ended, in one word and in its log's words; empty where it did not say."""
    log = tail(run.out / "log.txt", 1 << 15).splitlines()
    began = max((number for number, line in enumerate(log) if BEGINS.search(line)), default=-1)
    kind, words = _ending(log[began + 1 :])
    job = run.job_log()
    if (not kind or kind == "ended") and job:
        kind, words = _ending(_of_the_last_start(tail(job, 1 << 15).splitlines()))
    return kind, words


def job_words(job: State) -> str:
    """A job of Slurm in words."""
    if job.waits:
        when = f", expected to start {job.start}" if re.match(r"\d{4}-", job.start) else ""
        return f"job {job.id} {job.name} ({job.reason}){when}"
    if job.live:
        return f"job {job.id} {job.name} for {job.elapsed} on {job.nodelist}, {job.left} of its time left"
    return f"job {job.id} {job.name}"


def span(seconds: float) -> str:
    """A time in the two largest units that matter: 45 s, 3 min, 2 h 05 min, 3 d 4 h."""
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if seconds < 120:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60:02} min" if days < 2 else f"{days} d {hours % 24} h"


def _ending(lines: Sequence[str]) -> tuple[str, str]:
    cancelled = ("", "")
    for number in range(len(lines) - 1, -1, -1):
        if STEPS.search(lines[number]):
            break  # what was said before a step ended nothing
        for kind, pattern in ENDS:
            found = pattern.search(lines[number])
            if found:
                words = found[1].strip()
                if kind == "ended" and "DUE TO" not in words:  # so srun ends the others of a rank that has failed
                    cancelled = (kind, words)
                    break
                traced = (line for line in lines[number + 1 :] if line.strip() and not line.startswith(" "))
                return kind, words.replace(TRACE, next(traced, TRACE)) if words.endswith(TRACE) else words
    return cancelled


def _of_the_last_start(lines: list[str]) -> list[str]:
    began = max((number for number, line in enumerate(lines) if BEGINS.search(line)), default=-1)
    return lines[began + 1 :]


def _working(run: Run, job: State | None) -> str:
    """starting or running: whether the last attempt belongs to what runs now, and has done a step."""
    when = _seconds(str(run.attempt.get("time", "")))
    began = _seconds(job.start) if job else None
    if when is None or (began is not None and when < began - 2):
        return "starting"
    steps = run.stepped is not None and run.stepped >= when - 1 and run.step > (run.attempt.get("from_step") or 0)
    return "running" if steps else "starting"


def _seconds(text: str) -> float | None:
    for form in ("%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S"):
        try:
            return datetime.strptime(text, form).timestamp()
        except (ValueError, OverflowError):
            continue
    return None


def _far(run: Run) -> bool:
    """Whether a process of another host, which cannot be seen from here, has not signed off."""
    return run.holder is not None and run.holder.get("host") != process.host()


def _owners(runs: Sequence[Run]) -> list[int]:
    return sorted({Path(run.out).stat().st_uid for run in runs if run.jobs})


def _mean(run: Run, key: str) -> float | None:
    values = [row[key] for row in run.steps[-RECENT:] if isinstance(row.get(key), (int, float))]
    return sum(values) / len(values) if values else None
