"""Run directories: where they are, and what one says about its run, read in no time and without loading anything large."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpclm.cluster import lock
from hpclm.errors import ConfigError
from hpclm.job import ledger, rows, saved
from hpclm.job.ledger import Submission
from hpclm.registry import hint

MARKS = ("config.yaml", ledger.NAME, "attempts.jsonl")
DEEP = 3  # folders below the one that is searched


@dataclass(frozen=True)
class Run:
    """What a run directory says; nothing here asks a scheduler."""

    out: Path
    submissions: list[Submission]
    attempts: list[Mapping[str, Any]]
    """Lines of attempts.jsonl, the last of them where there are very many."""
    rows: list[Mapping[str, Any]]
    """The last lines of metrics.jsonl, of steps and evaluations."""
    stepped: float | None
    """When the last of them was written, in seconds since 1970."""
    checkpoint: tuple[int, float] | None
    """Step of the newest complete checkpoint, and when it was made."""
    bad: int
    """Checkpoints that were set aside."""
    holder: Mapping[str, Any] | None
    """Who wrote its name into the lock and has not taken it out: host, pid."""

    slow: list[Mapping[str, Any]] = field(default_factory=list)
    """Ranks that are slower than the others, as rank 0 last wrote it down: rank, host, times the median."""

    @property
    def attempt(self) -> Mapping[str, Any]:
        """The last attempt, empty where there was none."""
        return self.attempts[-1] if self.attempts else {}

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The last steps."""
        return [row for row in self.rows if "loss" in row]

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self.rows[-1]["step"] if self.rows else self.attempt.get("from_step") or 0

    @property
    def jobs(self) -> list[str]:
        """Slurm's numbers of its jobs, oldest first."""
        submitted = [each.job_id for each in self.submissions if each.cluster == "slurm"]
        here = [each.time for each in self.submissions if each.cluster != "slurm"][-1:]
        trained = [
            str(each["job_id"])
            for each in self.attempts
            # what was started from inside a job, by hpclm itself, is not that job
            if each.get("job_id")
            and each.get("launcher") != "local"
            and not (here and str(each.get("time", "")) >= here[0])
        ]
        return list(dict.fromkeys(submitted + trained))

    @property
    def processes(self) -> list[tuple[str, int, str]]:
        """Host, number and time of the processes that launched or are it, the newest last."""
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

    def total(self) -> int | None:
        """The planned number of steps; None where only the clock ends the run, or it cannot be told."""
        return self.attempt["steps"] if "steps" in self.attempt else planned(self.out / "config.yaml")

    def job_log(self) -> Path | None:
        """The newest log that a job of the run printed to."""
        written = [Path(each.log) for each in self.submissions if each.log]
        found = [path if path.is_absolute() else self.out / path for path in written]
        mine = [path for path in (*found, *(self.out / "logs").glob("job-*.log")) if path.is_file()]
        return max(mine, key=lambda path: path.stat().st_mtime, default=None)


def find(folder: Path, deep: int = DEEP) -> list[Path]:
    """Run directories in ``folder``, at most ``deep`` folders down; it may be one itself."""
    return sorted(_find(folder, deep))


def _find(folder: Path, deep: int) -> Iterator[Path]:
    with suppress(OSError):
        entries = list(os.scandir(folder))
        if any(entry.name in MARKS for entry in entries):
            yield folder
            return
        for entry in entries if deep else ():
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _find(folder / entry.name, deep - 1)


def resolve(word: str, runs: Path) -> Path:
    """The run directory a person means: a path, or a name below the folder ``runs``; ConfigError when there is none."""
    for path in (Path(word), runs / word):
        if any((path / mark).exists() for mark in MARKS):
            return path
    known = [str(path.relative_to(runs)) for path in find(runs)]
    has = f"; {runs} has {', '.join(known[:20])}{', …' * (len(known) > 20)}." if known else f", and none is in {runs}"
    raise ConfigError(f"{word} is no run directory{has}{hint(word, known)}")


def read(out: Path) -> Run:
    """What the run directory ``out`` says now. Files that are missing, being written or broken count as not there."""
    metrics = out / "metrics.jsonl"
    return Run(
        out=out,
        submissions=_or(ledger.read, out, []),
        attempts=_rows(out / "attempts.jsonl", rows.ATTEMPT, size=1 << 20),
        rows=_rows(metrics, rows.STEP, ["step"]),
        stepped=_or(lambda path: path.stat().st_mtime if path.is_file() else None, metrics, None),
        checkpoint=saved.newest(out / "checkpoints"),
        bad=len(list((out / "checkpoints").glob(".bad-*"))),
        holder=_holder(out / "lock"),
        slow=_slow(out / "ranks.json"),
    )


def planned(path: Path) -> int | None:
    """Steps that the budget in a settings file is enough for, where its numbers alone say so."""
    import yaml  # of use to few, and slow to load

    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        budget, batch = content["budget"], content["batch"]
        ends = [budget["steps"]] if budget.get("steps") else []
        counts = [
            budget.get("samples"),
            budget["tokens"] // content["model"]["context"] if budget.get("tokens") else None,
        ]
        if any(counts):
            from hpclm.config.plan import Plan, Rampup

            rampup = Rampup(*batch["rampup"]) if batch.get("rampup") else None
            plan = Plan.divide(1, batch["global_size"], 1, rampup)
            ends += [plan.steps_within(count) for count in counts if count]
        return min(ends, default=None) if all(map(rows.count, ends)) else None
    except (OSError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, yaml.YAMLError):
        return None


def _rows(
    path: Path, fields: Mapping[str, rows.Check], needs: Iterable[str] = (), size: int = rows.TAIL
) -> list[rows.Row]:
    return [row for line in rows.tail(path, size).splitlines() if (row := rows.parsed(line, fields, needs))]


def _holder(path: Path) -> Mapping[str, Any] | None:
    holder = lock.read(path) if path.is_file() else None  # a pipe would keep who reads it waiting
    return holder if rows.sane(holder, rows.HOLDER, ["pid"]) else None


def _slow(path: Path) -> list[Mapping[str, Any]]:
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        slow = json.loads(path.read_text(errors="replace"))["slow"] if path.is_file() else []
        return [row for row in slow if rows.sane(row, rows.SLOW, rows.SLOW)]
    return []


def _or(act: Any, path: Path, otherwise: Any) -> Any:
    try:
        return act(path)
    except OSError:
        return otherwise
