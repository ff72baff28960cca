"""Run directories: where they are, and what their files tell about a run, read quickly and without loading anything large."""

import json
import os
import pwd
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hpclm import files, folders
from hpclm.errors import MACHINE, ConfigError, unread
from hpclm.node.job import JobState
from hpclm.registry import hint
from hpclm.rundir import attempts, lock, rows, submissions, summary
from hpclm.rundir.folder import MARKS, survey_checkpoints
from hpclm.rundir.rows import Row
from hpclm.rundir.submissions import Submission

RUNS = Path("runs")
"""Where runs are, unless settings or a verb's --runs say otherwise."""
SLOW: dict[str, rows.Kind] = {"rank": int, "host": str, "times": float}
DEPTH = 3  # folders below the one that is searched


@dataclass(frozen=True)
class Run:
    """What the files of a run directory tell; no scheduler is asked."""

    out: Path
    submissions: list[Submission]
    summary: Row
    """The content of summary.json."""
    attempt: Row
    """The last attempt, as summary.json or attempts.jsonl has it; empty without one."""
    checkpoint: tuple[int, float] | None
    """Step and time of the newest complete checkpoint."""
    bad: int
    """Checkpoints that were set aside."""
    holder: Mapping[str, Any] | None
    """The process that the lock names: host, pid."""
    beat_age: float | None
    """Seconds since its last heartbeat; None without one."""
    slow: list[Row]
    """Stragglers, as rank 0 last recorded them: rank, host, times the median."""
    owner: int
    """UID of the owner."""
    damage: str = ""
    """What is wrong with its record; empty if nothing is."""

    @property
    def step(self) -> int:
        """The last completed step."""
        step: int = self.summary.get("step", self.attempt.get("from_step") or 0)
        return step

    @property
    def trained(self) -> bool:
        """Whether the last submission, if there is one, has started training."""
        if not self.submissions:
            return True
        last, began, job = self.submissions[-1], str(self.attempt.get("time", "")), str(self.attempt.get("job_id"))
        if any(submission.job_id == job for submission in self.submissions):
            return job == last.job_id
        return began > last.time or (began == last.time and not last.is_job)

    @property
    def total(self) -> int | None:
        """The planned number of steps; None if unknown, or if only time limits the run."""
        planned = None if self.trained else self.submissions[-1].steps  # settings may have changed since it trained
        return planned or self.summary.get("steps")

    @property
    def jobs(self) -> list[str]:
        """IDs of its jobs, oldest first: those that were submitted, and that of the last attempt, if it was started by hand."""
        submitted = [submission.job_id for submission in self.submissions if submission.is_job]
        launched = [submission.time for submission in self.submissions if not submission.is_job][-1:]
        job = self.attempt.get("job_id")
        # a local launch inside a job is not that job
        local = self.attempt.get("launcher") == "local" or [str(self.attempt.get("time", ""))] >= launched > []
        if job and not local:
            submitted.append(str(job))
        return list(dict.fromkeys(submitted))

    def owns(self, job: JobState) -> bool:
        """Whether ``job``, whose ID is one of ``jobs``, is the run's: another cluster, or this one set up anew, repeats IDs."""
        if all(submission.job_id != job.id for submission in self.submissions):  # by hand
            return self.holder is not None or self.summary.get("state") != "done"
        scripts = [
            submission.script
            for submission in self.submissions
            if submission.is_job and submission.job_id == job.id and submission.script
        ]
        # submitit submits script-1/.submission_file_*.sh for script-1.sbatch
        patterns = [re.escape(os.path.realpath(path.removesuffix(".sbatch"))) + r"[./].*" for path in scripts]
        return not (job.script and patterns) or re.match("|".join(patterns), os.path.realpath(job.script)) is not None

    def job_log(self) -> Path | None:
        """The newest log that a job of the run printed to."""
        with suppress(OSError):
            return max((self.out / "logs").glob("job-*.log"), key=lambda path: path.stat().st_mtime, default=None)
        return None


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
    """ConfigError if there is no such folder of runs, unless it is RUNS, which the first run makes."""
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
    if model := next(filter(None, map(folders.exported_model, paths)), ""):
        raise ConfigError(f"{name} is not a run directory: {model}")
    names = [str(path.relative_to(runs)) for path in find(runs)]
    has = f"; {runs} has {', '.join(names[:20])}{', …' * (len(names) > 20)}." if names else f", and {runs} has none"
    raise ConfigError(f"{name} is not a run directory{absent}{has}{hint(name, names)}")


def located(run: Path, runs: Path) -> Path:
    """``run``, or if there is no such folder the one of that name below ``runs``, for verbs that read a run's model; ConfigError if
    there is neither."""
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
    if os.geteuid() and (other := other_owner(out)):
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


def read(out: Path) -> Run:
    """Read the run directory ``out``; what a damaged record tells is unknown."""
    # strings: making a Path takes longer than reading a small file
    standing, holder = summary.read(out), lock.holder(f"{out}/lock")
    checkpoint, bad = survey_checkpoints(f"{out}/checkpoints")
    submitted, owner, damage = list[Submission](), 0, ""
    attempt = standing.get("attempt") or {}
    try:
        owner = out.stat().st_uid
        submitted = submissions.read(out)
        if not attempt:
            attempt = attempts.last(out)
            standing = standing or _clean_end(out, attempt)
    except OSError:
        pass
    except ConfigError as error:
        damage = str(error)
    return Run(
        out=out,
        submissions=submitted,
        summary=standing,
        attempt=attempt,
        checkpoint=checkpoint,
        bad=bad,
        holder=holder,
        beat_age=files.age(f"{out}/lock.beat") if holder else None,
        slow=_slow(f"{out}/ranks.json") if holder else [],
        owner=owner,
        damage=damage,
    )


def _clean_end(out: Path, attempt: Row) -> Row:
    """What summary.json would say of the end of the last attempt, if it were there and ends.jsonl has that end."""
    end = attempts.last_end(out)
    if not (attempt.get("time") and end and end["time"] >= attempt["time"]):
        return {}
    state = "exited" if end["code"] else end["ending"].partition(" ")[0]
    last = {"steps": attempt["steps"]} if "steps" in attempt else {}
    return {"state": state, "attempt": attempt, **last, **{name: end[name] for name in ("step", "ending", "code")}}


def _slow(path: str) -> list[Row]:
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        slow = json.loads(files.read_text(path, errors="replace"))["slow"]
        return [row for row in slow if rows.sane(row, SLOW, SLOW)]
    return []
