"""Find run directories, and read the facts in their files, quickly and without loading anything large."""

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
from hpclm.rundir import events, lease, rows, summary
from hpclm.rundir.events import AttemptEvents
from hpclm.rundir.folder import MARKS, survey_checkpoints
from hpclm.rundir.rows import Row

RUNS = Path("runs")
"""The folder of runs, unless settings or --runs name another."""
SLOW: dict[str, rows.Kind] = {"rank": int, "host": str, "times": float}
DEPTH = 3  # folders below the one that is searched


@dataclass(frozen=True)
class RunFacts:
    """The facts in the files of a run directory; no scheduler is asked."""

    out: Path
    events: Sequence[Row]
    """Its events, oldest first (``hpclm.rundir.events``)."""
    damage: str
    """The damage to its record, in words; empty without damage."""
    summary: Row
    """The content of summary.json."""
    checkpoint: tuple[int, float] | None
    """Step and time of the newest complete checkpoint."""
    bad: int
    """Checkpoints that were set aside."""
    holder: Mapping[str, Any] | None
    """The process that the lock names: host, pid."""
    beat_age: float | None
    """Seconds since its last heartbeat; None without one."""
    owner: int
    """UID of the owner."""

    @cached_property
    def submissions(self) -> list[Row]:
        """Its submissions, and its launches in the foreground, oldest first."""
        return events.of_kind(self.events, "submitted")

    @cached_property
    def attempts(self) -> list[AttemptEvents]:
        """Its attempts, oldest first."""
        return events.attempts(self.events)

    @property
    def attempt(self) -> Row:
        """The last attempt, as it began; empty without one."""
        return self.attempts[-1].began if self.attempts else {}

    @cached_property
    def latest(self) -> list[Row]:
        """Its events since the last submission or, if it has trained since, since the last attempt began."""
        return list(self.events[max(0, self._last("began" if self.trained else "submitted")) :])

    @cached_property
    def end(self) -> Row:
        """How its last start ended; empty if nothing says so."""
        return events.last_end(self.latest)

    @property
    def over(self) -> bool:
        """Whether its last attempt came to its end, and its process has left."""
        return self.holder is None and self.trained and self.end.get("state") in ("done", "stopped")

    @property
    def cancelled_by(self) -> str:
        """The user who cancelled it last, if nothing has started since; else empty."""
        return "".join(str(event.get("by")) for event in events.of_kind(self.latest, "cancelled")[-1:])

    @property
    def slow(self) -> list[Row]:
        """Stragglers of the current attempt: rank, host, times the median."""
        noted = events.of_kind(self.latest, "slow") if self.trained and self.holder else []
        return [row for event in noted[-1:] for row in event.get("ranks") or [] if rows.sane(row, SLOW, SLOW)]

    @property
    def step(self) -> int:
        """The last completed step."""
        step: int = self.summary.get("step", self.end.get("step") or self.attempt.get("from_step") or 0)
        return step

    @cached_property
    def trained(self) -> bool:
        """Whether the last submission, if there is one, has started training."""
        if not self.submissions:
            return True
        last = self.submissions[-1]
        job = str(self.attempt.get("job_id"))
        if any(str(submission["job_id"]) == job for submission in self.submissions):
            return job == str(last["job_id"])
        return self._last("began") > self._last("submitted")

    def _last(self, kind: str) -> int:
        """The place of the last event of this kind; -1 without one."""
        return max((place for place, event in enumerate(self.events) if event["kind"] == kind), default=-1)

    @property
    def total(self) -> int | None:
        """The planned number of steps; None if unknown, or if only time limits the run."""
        planned = None
        if not self.trained:  # settings may have changed since it trained
            planned = self.submissions[-1].get("steps")
        return planned or self.summary.get("steps") or self.attempt.get("steps")

    @property
    def jobs(self) -> list[str]:
        """IDs of its jobs, oldest first: those that were submitted, and that of the last attempt, if it was started by hand."""
        submitted = [str(submission["job_id"]) for submission in self.submissions if is_job(submission)]
        job = self.attempt.get("job_id")
        # a launch on this machine from inside a job is not that job
        launched = self.trained and bool(self.submissions) and not is_job(self.submissions[-1])
        if job and self.attempt.get("launcher") != "local" and not launched:
            submitted.append(str(job))
        return list(dict.fromkeys(submitted))

    def owns(self, job: Job) -> bool:
        """Whether ``job``, with an ID that is one of ``jobs``, is the run's. Another cluster, or this one set up anew, repeats IDs."""
        mine = [submission for submission in self.submissions if str(submission["job_id"]) == job.id]
        if not mine:  # by hand
            return self.holder is not None or self.end.get("state") != "done"
        scripts = [submission["script"] for submission in mine if is_job(submission) and submission.get("script")]
        # submitit submits script-1/.submission_file_*.sh for script-1.sbatch
        patterns = [re.escape(os.path.realpath(path.removesuffix(".sbatch"))) + r"[./].*" for path in scripts]
        return not (job.script and patterns) or re.match("|".join(patterns), os.path.realpath(job.script)) is not None

    def job_log(self) -> Path | None:
        """The newest log that a job of the run printed to."""
        with suppress(OSError):
            return max((self.out / "logs").glob("job-*.log"), key=lambda path: path.stat().st_mtime, default=None)
        return None


def is_job(submission: Row) -> bool:
    """Whether a submission is a job of a scheduler, not a launch in the foreground."""
    return submission["cluster"] not in ("local", "mpirun")


def find(folder: Path, depth: int = DEPTH) -> list[Path]:
    """Run directories in ``folder``, at most ``depth`` folders down; it may be one itself. HpclmError if the disk fails."""
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
            return
        for entry in entries if depth else ():
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _find(entry.path, depth - 1)


def check_folder(folder: Path) -> None:
    """ConfigError unless ``folder`` exists, or is RUNS, which the first run creates."""
    exists = os.path.lexists(folder)
    if not folder.is_dir() and (exists or folder != RUNS):
        wrong = "is not a folder" if exists else "does not exist"
        raise ConfigError(f"{folder} {wrong}; --runs names the folder that runs are in")


def resolve(name: str, runs: Path) -> Path:
    """The run directory of this ``name``: a path, or a name below the folder ``runs``; ConfigError without one."""
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
    """``run``, or the folder of that name below ``runs``, for commands that read a run's model; ConfigError if neither exists."""
    if run.exists():
        return run
    for folder in (run.parent, runs / run.parent):
        if folder.name == "checkpoints" and folder.is_dir():
            steps = sorted(path.name for path in folder.glob("step-*"))
            has = f"has {', '.join(steps[-20:])}" if steps else "has no checkpoints"
            raise ConfigError(f"{run} does not exist; {folder} {has}")
    return runs / run if (runs / run).is_dir() else resolve(str(run), runs)


def choose(names: Iterable[str], runs: Path) -> list[Path]:
    """The run directories that several names or patterns such as ``sweep-*`` match; each run once."""
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
    """The user that ``path`` belongs to, if that is not this one; else empty."""
    uid = path.stat().st_uid
    return "" if uid == os.geteuid() else _user(uid)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user number {uid}"


def read_run(out: Path) -> RunFacts:
    """Read the run directory ``out``; a damaged record is noted as ``damage``."""
    # strings: making a Path takes longer than reading a small file
    holder = lease.holder(out)
    checkpoint, bad = survey_checkpoints(f"{out}/checkpoints")
    happened = list[Row]()
    damage = ""
    owner = 0
    try:
        happened.extend(events.read_events(out))
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
        holder=holder if holder.get("pid") else None,
        beat_age=files.age(f"{out}/lock.beat") if holder.get("pid") else None,
        owner=owner,
    )
