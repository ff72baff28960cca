"""Run directories: where they are, and what their files tell about a run, read quickly and without loading anything large."""

import json
import os
import pwd
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.errors import ConfigError
from hpclm.registry import hint
from hpclm.rundir import lock, rows, saved, submissions, summary
from hpclm.rundir.rows import Row
from hpclm.rundir.submissions import Submission

MARKS = ("config.yaml", submissions.NAME, "attempts.jsonl")
LARGEST = 1 << 20  # bytes at the end of attempts.jsonl that are read
DEPTH = 3  # folders below the one that is searched


@dataclass(frozen=True)
class Run:
    """What the files of a run directory tell; Slurm is not asked."""

    out: Path
    submissions: list[Submission]
    attempts: list[Row]
    """Lines of attempts.jsonl, oldest first; of a run that was read briefly, the last one."""
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
    slow: list[Row] = field(default_factory=list)
    """Stragglers, as rank 0 last recorded them: rank, host, times the median."""
    rollback: int | None = None
    """Step of the checkpoint that the next attempt rolls back to."""
    owner: int = 0
    """UID of the owner."""

    @property
    def attempt(self) -> Row:
        """The last attempt; empty without one."""
        return self.attempts[-1] if self.attempts else {}

    @property
    def step(self) -> int:
        """The last completed step."""
        step: int = self.summary.get("step", self.attempt.get("from_step") or 0)
        return step

    @property
    def trained(self) -> bool:
        """Whether the last submission, if there is one, has started training."""
        last = self.submissions[-1] if self.submissions else None
        if last and last.is_job:
            return any(str(each.get("job_id")) == last.job_id for each in self.attempts)
        return last is None or str(self.attempt.get("time", "")) >= last.time

    @property
    def total(self) -> int | None:
        """The planned number of steps; None if unknown, or if only time limits the run."""
        planned = None if self.trained else self.submissions[-1].steps  # settings may have changed since it trained
        return planned or self.summary.get("steps")

    @property
    def jobs(self) -> list[str]:
        """IDs of its Slurm jobs, oldest first."""
        submitted = [each.job_id for each in self.submissions if each.is_job]
        here = [each.time for each in self.submissions if not each.is_job][-1:]
        trained = [
            str(each["job_id"])
            for each in self.attempts
            # a local launch inside a job is not that job
            if each.get("job_id")
            and each.get("launcher") != "local"
            and not (here and str(each.get("time", "")) >= here[0])
        ]
        return list(dict.fromkeys(submitted + trained))

    @property
    def processes(self) -> list[tuple[str, int, str]]:
        """Host, PID and start time of its launcher and its rank 0, the newest last."""
        launched = [
            (each.host, int(each.job_id), each.time)
            for each in self.submissions
            if not each.is_job and each.job_id.isdecimal()
        ]
        return launched[-1:] + [
            (str(each["host"]), int(each["pid"]), str(each["time"]))
            for each in self.attempts[-1:]
            if {"host", "pid", "time"} <= each.keys()
        ]

    def job_log(self) -> Path | None:
        """The newest log that a job of the run printed to."""
        printed: list[Path] = []
        with suppress(OSError):
            printed = sorted((self.out / "logs").glob("job-*.log"))
        named = [self.out / each.log for each in self.submissions if each.log]
        dated = [(path.stat().st_mtime, path) for path in (*named, *printed) if files.is_file(path)]
        return max(dated)[1] if dated else None


def find(folder: Path, depth: int = DEPTH) -> list[Path]:
    """Run directories in ``folder``, at most ``depth`` folders down; it may be one itself."""
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


def none_in(folder: Path) -> str:
    """That ``find`` has found nothing, and whether the folder is why."""
    why = "" if folder.is_dir() else ", which is not a folder" if folder.exists() else ", which does not exist"
    return f"no run in {folder}{why}"


def resolve(word: str, runs: Path) -> Path:
    """The run directory that ``word`` names: a path, or a name below the folder ``runs``; ConfigError without one."""
    for path in (Path(word), runs / word):
        if is_run(path):
            return path
    known = [str(path.relative_to(runs)) for path in find(runs)]
    has = f"; {runs} has {', '.join(known[:20])}{', …' * (len(known) > 20)}." if known else f", and {runs} has none"
    raise ConfigError(f"{word} is not a run directory{has}{hint(word, known)}")


def choose(words: Iterable[str], runs: Path) -> list[Path]:
    """The run directories that several names or patterns such as ``sweep-*`` match; each run once."""
    found: list[Path] = []
    for word in words:
        if re.search(r"[*?[]", word) and not any(map(is_run, (Path(word), runs / word))):
            below = [path for path in find(runs) if fnmatchcase(str(path.relative_to(runs)), word)]
            matching = below or sorted(filter(is_run, Path(Path(word).anchor).glob(word.lstrip("/"))))
            if not matching:
                raise ConfigError(f"no run directory matches {word!r}, neither here nor in {runs}")
            found += matching
        else:
            found.append(resolve(word, runs))
    return list({path.resolve(): path for path in found}.values())


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory; ConfigError if it cannot be read."""
    try:
        return any((path / mark).exists() for mark in MARKS)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}{_whose(path)}") from None


def check_own(out: Path, act: str) -> None:
    """ConfigError if the run belongs to another user."""
    if os.geteuid() not in (0, out.stat().st_uid):
        raise ConfigError(f"{files.shown(out)} cannot be {act} by you{_whose(out)}")


def other_owner(path: Path) -> str:
    """The user that ``path`` belongs to, if that is not this one; else empty."""
    uid = path.stat().st_uid
    return "" if uid == os.geteuid() else _user(uid)


def _whose(path: Path) -> str:
    with suppress(OSError):
        return f"; it belongs to {_user(path.stat().st_uid)}"
    return ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user number {uid}"


def read(out: Path, brief: bool = False) -> Run:
    """Read the run directory ``out``. Files that are missing, incomplete or broken are ignored.

    ``brief``: only what one line about it needs.
    """
    # strings: making a Path takes longer than reading a small file
    standing = summary.read(out)
    checkpoint, bad = saved.survey(f"{out}/checkpoints")
    holder = lock.holder(f"{out}/lock")
    submitted, owner = list[Submission](), 0
    with suppress(OSError):
        owner = out.stat().st_uid
        submitted = submissions.read(out)
    run = Run(
        out=out,
        submissions=submitted,
        attempts=[standing["attempt"]] if standing.get("attempt") else [],
        summary=standing,
        checkpoint=checkpoint,
        bad=bad,
        holder=holder,
        beat_age=files.age(f"{out}/lock.beat") if holder else None,
        slow=_slow(f"{out}/ranks.json") if holder else [],
        owner=owner,
    )
    if brief and run.trained and standing:
        return run
    attempts, rollback = rows.parsed_lines(rows.tail(f"{out}/attempts.jsonl", LARGEST), rows.ATTEMPT), None
    with suppress(OSError, ConfigError):
        rollback = submissions.rollback(out)
    return replace(run, attempts=attempts, rollback=rollback)


def _slow(path: str) -> list[Row]:
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        slow = json.loads(files.read_text(path, errors="replace"))["slow"]
        return [row for row in slow if rows.sane(row, rows.SLOW, rows.SLOW)]
    return []
