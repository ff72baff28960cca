"""Run directories: where they are, and what their files tell about a run, read quickly and without loading anything large."""

import json
import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.errors import ConfigError
from hpclm.registry import hint
from hpclm.rundir import lock, logs, planned, rows, saved, submissions
from hpclm.rundir.submissions import Submission

MARKS = ("config.yaml", submissions.NAME, "attempts.jsonl")
STEPS = 200  # lines of metrics.jsonl that are read
WIDTH = 1 << 10  # bytes that are read for each of them
FEW = 4  # attempts and submissions of a run that one line about it needs
DEPTH = 3  # folders below the one that is searched


@dataclass(frozen=True)
class Run:
    """What the files of a run directory tell; Slurm is not asked."""

    out: Path
    submissions: list[Submission]
    attempts: list[Mapping[str, Any]]
    """Lines of attempts.jsonl; the last ones if there are very many."""
    rows: list[Mapping[str, Any]]
    """The last lines of metrics.jsonl, of steps and evaluations."""
    stepped: float | None
    """When the last line was written, in seconds since 1970."""
    checkpoint: tuple[int, float] | None
    """Step and time of the newest complete checkpoint."""
    bad: int
    """Checkpoints that were set aside."""
    holder: Mapping[str, Any] | None
    """The process that the lock names: host, pid."""

    attempt_count: int = 0
    """Number of attempts, with those that were not read."""
    slow: list[Mapping[str, Any]] = field(default_factory=list)
    """Stragglers, as rank 0 last recorded them: rank, host, times the median."""
    rollback: int | None = None
    """Step of the checkpoint that the next attempt rolls back to."""
    ended: tuple[str, str] = ("", "")
    """How the last attempt ended: its state, and the message in its log; empty if unknown."""
    unbegun: "Unbegun | None" = None
    """The last job, if it has not started training."""
    owner: int = 0
    """UID of the owner."""
    total: int | None = None
    """The planned number of steps, by its settings or its last attempt; None if unknown, or if only time limits the run."""

    @property
    def attempt(self) -> Mapping[str, Any]:
        """The last attempt; empty without one."""
        return self.attempts[-1] if self.attempts else {}

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The last steps."""
        return [row for row in self.rows if "loss" in row]

    @property
    def step(self) -> int:
        """The last completed step."""
        return self.rows[-1]["step"] if self.rows else self.attempt.get("from_step") or 0

    @property
    def jobs(self) -> list[str]:
        """IDs of its Slurm jobs, oldest first."""
        submitted = [each.job_id for each in self.submissions if each.cluster == "slurm"]
        here = [each.time for each in self.submissions if each.cluster != "slurm"][-1:]
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
            if each.cluster != "slurm" and each.job_id.isdecimal()
        ]
        return launched[-1:] + [
            (str(each["host"]), int(each["pid"]), str(each["time"]))
            for each in self.attempts[-1:]
            if {"host", "pid", "time"} <= each.keys()
        ]

    def job_log(self) -> Path | None:
        """The newest log that a job of the run printed to."""
        return _job_log(self.out, self.submissions)


@dataclass(frozen=True)
class Unbegun:
    """A job that has not started training."""

    words: str
    """The error in its log."""
    printed: bool
    """Whether it has a log, so Slurm had started it."""
    told: bool
    """Whether it was terminated before training started."""
    fault: str = ""
    """The line of its log that probably tells why it failed."""


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


def read(out: Path, steps: int = STEPS, brief: bool = False) -> Run:
    """Read the run directory ``out``, with the last ``steps`` lines of metrics.jsonl.

    Files that are missing, incomplete or broken are ignored. ``brief``: only what one line about it needs. The files of its
    newest checkpoint are not looked at.
    """
    # strings: making a Path takes longer than reading a small file
    metrics, written = rows.dated_tail(f"{out}/metrics.jsonl", steps * WIDTH)
    begun = rows.tail(f"{out}/attempts.jsonl", 1 << 20)
    attempts = _rows(begun, rows.ATTEMPT, count=FEW if brief else None)
    submitted = _or(partial(submissions.read, count=FEW if brief else None), out, [])
    checkpoint, bad = saved.survey(f"{out}/checkpoints", brief)
    holder = lock.holder(f"{out}/lock")
    last = attempts[-1] if attempts else {}
    trained = not submitted or _trained(submitted[-1], attempts)
    recorded = "steps" in last and trained  # otherwise the settings may have changed since
    return Run(
        out=out,
        submissions=submitted,
        attempts=attempts,
        rows=_rows(metrics, rows.STEP, ["step"], count=steps),
        stepped=written,
        checkpoint=checkpoint,
        bad=bad,
        holder=holder,
        attempt_count=begun.count("\n{") + begun.startswith("{") if len(attempts) == FEW else len(attempts),
        slow=_slow(f"{out}/ranks.json") if holder else [],
        rollback=None if brief else _or(submissions.rollback, out, None),
        ended=_ended(out, submitted, trained),
        unbegun=None if trained else _unbegun(out, submitted[-1]),
        owner=_or(lambda path: path.stat().st_uid, out, 0),
        total=last["steps"] if recorded else planned.steps(out / "config.yaml") or last.get("steps"),
    )


def _trained(last: Submission, attempts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last job of a run has started training, according to its files."""
    if last.cluster == "slurm":
        return any(str(each.get("job_id")) == last.job_id for each in attempts)
    return bool(attempts) and str(attempts[-1].get("time", "")) >= last.time


def _ended(out: Path, submitted: Sequence[Submission], trained: bool) -> tuple[str, str]:
    said = logs.last_words(f"{out}/log.txt")
    log = _job_log(out, submitted) if trained and said[0] in ("", "ended") else None
    return logs.last_words(log) if log else said


def _job_log(out: Path, submitted: Sequence[Submission]) -> Path | None:
    """The newest log that a job of the run in ``out`` printed to."""
    named = [out / each.log for each in submitted if each.log]
    printed = _or(lambda folder: sorted(folder.glob("job-*.log")), out / "logs", [])
    dated = [(when, path) for path in (*named, *printed) if (when := _written(path))]
    return max(dated)[1] if dated else None


def _unbegun(out: Path, submission: Submission) -> Unbegun:
    path = out / submission.log
    told = logs.terminated(path)
    return Unbegun("" if told else logs.last_words(path)[1], _written(path) is not None, told, logs.last_fault(path))


def _written(path: Path) -> float | None:
    """When a regular file was last written, in seconds since 1970; None without one."""
    found = _or(Path.stat, path, None)
    return found.st_mtime if found and stat.S_ISREG(found.st_mode) else None


def _rows(
    text: str, fields: Mapping[str, rows.Check], needs: Iterable[str] = (), count: int | None = None
) -> list[Mapping[str, Any]]:
    """The last ``count`` valid lines of a text."""
    lines = reversed(text.splitlines())
    found: Iterator[Mapping[str, Any]] = (row for line in lines if (row := rows.parsed(line, fields, needs)))
    return list(islice(found, count))[::-1]


def _slow(path: str) -> list[Mapping[str, Any]]:
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        slow = json.loads(files.read_text(path, errors="replace"))["slow"]
        return [row for row in slow if rows.sane(row, rows.SLOW, rows.SLOW)]
    return []


def _or(act: Any, path: Path, otherwise: Any) -> Any:
    """``act(path)``, or ``otherwise`` for a file that cannot be read, or has no meaning."""
    with suppress(OSError, ConfigError):
        return act(path)
    return otherwise
