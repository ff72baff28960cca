"""Find run directories, and read their files quickly, without loading large libraries."""

import os
import pwd
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from hpclm.base import files, folders
from hpclm.base.errors import MACHINE, ConfigError, unread
from hpclm.base.registry import hint
from hpclm.node.job import Job
from hpclm.rundir import branches, events, lease, rows, summary
from hpclm.rundir.events import AttemptEvents
from hpclm.rundir.folder import MARKS, survey_checkpoints
from hpclm.rundir.rows import Row

RUNS = Path("runs")
"""The folder of runs, unless settings or --runs name another one."""
SLOW: dict[str, rows.Kind] = {"rank": int, "host": str, "times": float}
DEPTH = 3  # how many levels of folders are searched for runs


@dataclass(frozen=True)
class RunFacts:
    """The facts in the files of a run directory. Reading them asks no scheduler."""

    out: Path
    events: Sequence[Row]
    """Its events, oldest first (``hpclm.rundir.events``)."""
    damage: str
    """The error about its damaged or unreadable events; empty without one."""
    summary: Row
    """The content of summary.json."""
    checkpoint: tuple[int, float] | None
    """Step and time of the newest complete checkpoint."""
    bad: int
    """The number of checkpoints that were set aside as bad."""
    holder: Mapping[str, Any] | None
    """The process that the lock names: host, pid."""
    beat_age: float | None
    """Seconds since its last heartbeat; None without one."""
    owner: int
    """UID of the owner."""

    @cached_property
    def submissions(self) -> list[Row]:
        """Its submissions and its launches in the foreground, oldest first."""
        return events.of_kind(self.events, "submitted")

    @cached_property
    def attempts(self) -> list[AttemptEvents]:
        """Its attempts, oldest first."""
        return events.attempts(self.events)

    @cached_property
    def trunk(self) -> branches.Trunk | None:
        """The run that it goes on from; None if it is not a branch."""
        return branches.trunk_of(self.events)

    @property
    def attempt(self) -> Row:
        """The event of the last attempt's beginning; empty without an attempt."""
        return self.attempts[-1].began if self.attempts else {}

    @property
    def saved_step(self) -> int | None:
        """Step of the newest complete checkpoint; None without a checkpoint."""
        return self.checkpoint[0] if self.checkpoint else None

    @cached_property
    def latest(self) -> list[Row]:
        """Its events from the beginning of the last attempt on, or from the last submission on if that has not trained yet."""
        begin = self._last("began" if self.trained else "submitted")
        return list(self.events[max(0, begin) :])

    @cached_property
    def end(self) -> Row:
        """The event that says how its last start ended; empty without one."""
        return events.last_end(self.latest)

    @property
    def over(self) -> bool:
        """Whether its last attempt was completed, and its process has released the run directory."""
        return self.holder is None and self.trained and self.end.get("state") in ("done", "stopped")

    @property
    def cancelled_by(self) -> str:
        """The user who cancelled it last; empty if nobody has since the last start."""
        return "".join(str(event.get("by")) for event in events.of_kind(self.latest, "cancelled")[-1:])

    @property
    def slow(self) -> list[Row]:
        """Stragglers of the current attempt: rank, host, and the time of a step as a multiple of the median."""
        if not (self.trained and self.holder):
            return []
        noted = events.of_kind(self.latest, "slow")[-1:]
        return [row for event in noted for row in event.get("ranks") or [] if rows.sane(row, SLOW, SLOW)]

    @property
    def step(self) -> int:
        """The last completed step."""
        step: int = self.summary.get("step", self.end.get("step") or self.attempt.get("from_step") or 0)
        return step

    @cached_property
    def trained(self) -> bool:
        """Whether the last submission has started training; True without a submission."""
        if not self.submissions:
            return True
        last = self.submissions[-1]
        job = str(self.attempt.get("job_id"))
        if any(str(submission["job_id"]) == job for submission in self.submissions):
            return job == str(last["job_id"])
        return self._last("began") > self._last("submitted")

    def _last(self, kind: str) -> int:
        """The index of the last event of this kind; -1 without one."""
        return max((index for index, event in enumerate(self.events) if event["kind"] == kind), default=-1)

    @property
    def total(self) -> int | None:
        """The planned number of steps; None if unknown, or if only time limits the run."""
        planned = None
        if not self.trained:  # settings may have changed since it trained
            planned = self.submissions[-1].get("steps")
        return planned or self.summary.get("steps") or self.attempt.get("steps")

    @property
    def jobs(self) -> list[str]:
        """IDs of its jobs, oldest first: the submitted jobs, then the last attempt's job if a user started it by hand."""
        submitted = [str(submission["job_id"]) for submission in self.submissions if is_job(submission)]
        job = self.attempt.get("job_id")
        # a launch on this machine may happen inside a job, but the run is not that job
        launched = self.trained and bool(self.submissions) and not is_job(self.submissions[-1])
        if job and self.attempt.get("launcher") != "local" and not launched:
            submitted.append(str(job))
        return list(dict.fromkeys(submitted))

    def owns(self, job: Job) -> bool:
        """Whether ``job``, which has an ID of ``jobs``, is the run's job: another cluster may have a job with the same ID."""
        mine = [submission for submission in self.submissions if str(submission["job_id"]) == job.id]
        if not mine:  # started by hand
            return self.holder is not None or self.end.get("state") != "done"
        scripts = [submission["script"] for submission in mine if is_job(submission) and submission.get("script")]
        # submitit submits script-1/.submission_file_*.sh for script-1.sbatch
        patterns = [re.escape(os.path.realpath(path.removesuffix(".sbatch"))) + r"[./].*" for path in scripts]
        if not (job.script and patterns):  # nothing to compare
            return True
        return re.match("|".join(patterns), os.path.realpath(job.script)) is not None

    def job_log(self) -> Path | None:
        """The newest log of the run's jobs; None without a log."""
        with suppress(OSError):
            return max((self.out / "logs").glob("job-*.log"), key=lambda path: path.stat().st_mtime, default=None)
        return None


def is_job(submission: Row) -> bool:
    """Whether a submission is a job of a scheduler, not a launch in the foreground."""
    return submission["cluster"] not in ("local", "mpirun")


def find(folder: Path, depth: int = DEPTH) -> list[Path]:
    """Run directories in ``folder``, at most ``depth`` levels down, or ``folder`` itself. HpclmError if the disk fails."""
    try:
        os.scandir(folder).close()
    except OSError as error:
        if error.errno in MACHINE:
            raise unread(error, folder) from None
    return sorted(map(Path, _find(str(folder), depth)))


def _find(folder: str, depth: int) -> Iterator[str]:
    with suppress(OSError):
        entries = list(os.scandir(folder))
        if any(entry.name in MARKS for entry in entries):
            yield folder
        elif depth:
            for entry in entries:
                if entry.is_dir() and not entry.name.startswith("."):
                    yield from _find(entry.path, depth - 1)


def check_folder(folder: Path) -> None:
    """ConfigError unless ``folder`` exists, or is RUNS, which the first run creates."""
    if folder.is_dir():
        return
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} is not a folder; --runs names the folder that runs are in")
    if folder != RUNS:
        raise ConfigError(f"{folder} does not exist; --runs names the folder that runs are in")


def resolve(name: str, runs: Path) -> Path:
    """The run directory ``name``: a path, or a name below the folder ``runs``; ConfigError if it is not a run directory."""
    if not name.strip():
        raise ConfigError("the name of the run is empty")
    paths = (Path(name), runs / name)
    for path in paths:
        if is_run(path):
            return path
    absent = "" if any(map(os.path.lexists, paths)) else ": it does not exist"
    for path in paths:
        model = folders.exported_model(path)
        if model:
            raise ConfigError(f"{name} is not a run directory: {model}")
    names = [str(path.relative_to(runs)) for path in find(runs)]
    has = f", and {runs} has none"
    if names:
        more = ", …" if len(names) > 20 else ""
        has = f"; {runs} has {', '.join(names[:20])}{more}."
    raise ConfigError(f"{name} is not a run directory{absent}{has}{hint(name, names)}")


def located(run: Path, runs: Path) -> Path:
    """``run``, or the folder with this name below ``runs``, for commands that read a model; ConfigError if neither exists."""
    if run.exists():
        return run
    for folder in (run.parent, runs / run.parent):
        if folder.name == "checkpoints" and folder.is_dir():
            steps = sorted(path.name for path in folder.glob("step-*"))
            has = ", ".join(steps[-20:]) or "no checkpoints"
            raise ConfigError(f"{run} does not exist; {folder} has {has}")
    if (runs / run).is_dir():
        return runs / run
    return resolve(str(run), runs)


def choose(names: Iterable[str], runs: Path) -> list[Path]:
    """The run directories that ``names`` match, each once; a name may be a pattern such as ``sweep-*``."""
    chosen: list[Path] = []
    for name in names:
        if re.search(r"[*?[]", name) and not any(map(is_run, (Path(name), runs / name))):
            below = [path for path in find(runs) if fnmatchcase(str(path.relative_to(runs)), name)]
            matching = below or sorted(filter(is_run, Path(Path(name).anchor).glob(name.lstrip("/"))))
            if not matching:
                raise ConfigError(f"no run directory matches {name!r}, neither here nor in {runs}")
            chosen += matching
        else:
            chosen.append(resolve(name, runs))
    return list({path.resolve(): path for path in chosen}.values())


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory; ConfigError if it cannot be read."""
    try:
        return any((path / mark).exists() for mark in MARKS)
    except OSError as error:
        owner = ""
        with suppress(OSError):
            owner = f"it belongs to {_user(path.stat().st_uid)}"
        raise unread(error, path, owner) from None


def check_own(out: Path, act: str) -> None:
    """ConfigError if the run belongs to another user, and this one is not root."""
    other = other_owner(out)
    if os.geteuid() and other:
        raise ConfigError(f"{files.shown(out)} cannot be {act} by you; it belongs to {other}")


def other_owner(path: Path) -> str:
    """The user that ``path`` belongs to; empty if it belongs to this user."""
    uid = path.stat().st_uid
    return "" if uid == os.geteuid() else _user(uid)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user number {uid}"


def read_run(out: Path) -> RunFacts:
    """The facts of the run directory ``out``. An error of reading its events is noted as ``damage``."""
    # paths are strings here: making a Path takes longer than reading a small file
    holder: Row | None = lease.holder(out)
    beat_age = None
    if holder and holder.get("pid"):
        beat_age = files.age(f"{out}/lock.beat")
    else:
        holder = None
    checkpoint, bad = survey_checkpoints(f"{out}/checkpoints")
    happened: Sequence[Row] = []
    damage = ""
    owner = 0
    try:
        happened = events.read_events(out)
    except ConfigError as error:
        damage = str(error)
    except OSError as error:
        damage = f"{out}/{events.NAME} cannot be read: {error.strerror}"
    with suppress(OSError):
        owner = os.stat(out).st_uid  # noqa: PTH116
    return RunFacts(
        out=out,
        events=happened,
        damage=damage,
        summary=summary.read_summary(out),
        checkpoint=checkpoint,
        bad=bad,
        holder=holder,
        beat_age=beat_age,
        owner=owner,
    )
