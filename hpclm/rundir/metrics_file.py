"""metrics.jsonl, scores.jsonl and experts.jsonl: the measurements of a run. No other module opens these files.

A run of millions of steps has gigabytes of rows, so the files are read in blocks, one at a time.

metrics.jsonl has the steps and evaluations. Only the run itself writes it.

scores.jsonl has the scores of each checkpoint at tasks. ``hpclm evaluate --follow`` writes it, and holds a lock on it. The run
copies these rows to metrics.jsonl.

experts.jsonl has the tokens that each expert got in some steps. For the 10 steps up to step 20, a line is
{"step": 20, "steps": 10, "time": 1764.2, "tokens": {"block0": [412, 388, ...], ...}}.
"""

import filecmp
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpclm.base import files
from hpclm.base.errors import LockedError
from hpclm.base.side_path import AppendedFile
from hpclm.rundir import events, rows
from hpclm.rundir.rows import Kind, Row, RowBlock, all_fit, fits

log = logging.getLogger(__name__)
NAME = "metrics.jsonl"
LOST = "metrics.lost.jsonl"  # lines of metrics.jsonl for steps that a later attempt repeated
SCORES = "scores.jsonl"
EXPERTS = "experts.jsonl"


def are_scores(value: Any) -> bool:
    """Whether ``value`` is a table of scores: task -> metric -> number, or None for a number that is not finite."""
    if not isinstance(value, dict) or not all(isinstance(table, dict) for table in value.values()):
        return False
    return all(fits(score, float) for table in value.values() for score in table.values())


def are_counts(value: Any) -> bool:
    """Whether ``value`` has a count for each expert: block -> counts, equally many for every block."""
    if not isinstance(value, dict) or not all(isinstance(counts, list) and counts for counts in value.values()):
        return False
    same_length = len({len(counts) for counts in value.values()}) == 1
    return same_length and all(None not in counts and all_fit(counts, int) for counts in value.values())


STEP: dict[str, Kind] = {
    **dict.fromkeys(("step", "samples", "spiking_since"), int),
    **dict.fromkeys(("loss", "validation_loss", "grad_norm", "lr", "loss_scale"), float),
    **dict.fromkeys(("step_seconds", "tokens_per_second", "time"), float),
    "part": str,
    "tasks": are_scores,
}
"""The fields that hpclm reads. A row may lack some of these fields, and may have others."""


def blocks(out: Path, fields: Mapping[str, Kind] = STEP, lost: bool = False, begin: int = 0) -> Iterator[RowBlock]:
    """The rows of the run in ``out``, or of repeated steps (``lost``), from an offset on. Errors: see ``rows.row_blocks``."""
    return _scan(out / (LOST if lost else NAME), fields, begin)


def _scan(path: Path, fields: Mapping[str, Kind] = STEP, begin: int = 0) -> Iterator[RowBlock]:
    return rows.row_blocks(path, fields, ("step",), begin)


def _last_step(block: RowBlock) -> int:
    """The largest step of the rows in ``block``."""
    return max(row["step"] for row in block.rows)


def stream(out: Path, fields: Mapping[str, Kind] = STEP) -> Iterator[dict[str, Any]]:
    """The rows of the run in ``out``. Errors: see ``rows.row_blocks``."""
    return rows.stream(out / NAME, fields, ["step"])


def last(out: Path, fields: Mapping[str, Kind] = STEP) -> list[dict[str, Any]]:
    """The rows at the end of the file; see ``rows.last``."""
    return rows.last(out / NAME, fields, ["step"])


def last_step(out: Path) -> int:
    """The last step with a row; 0 without rows."""
    return max((row["step"] for row in last(out)), default=0)


def note_reached(out: Path, step: int) -> None:
    """Record how far the run has come, before the rows past ``step`` are dropped. OSError if the event cannot be written."""
    reached = last_step(out)
    if reached > step:
        events.append(out, "reached", step=reached)


def rollbacks(out: Path) -> int:
    """How often rows were moved to another file because the run went back to an older checkpoint."""
    return sum(1 for _ in out.glob("metrics.rolled-back-*.jsonl"))


def appended(out: Path, may_write: Callable[[], bool]) -> AppendedFile:
    """metrics.jsonl of the run in ``out``, to append to; ``may_write``: see AppendedFile."""
    return AppendedFile(out / NAME, may_write=may_write)


def expert_tokens(out: Path, may_write: Callable[[], bool]) -> AppendedFile:
    """experts.jsonl of the run in ``out``, to append to; ``may_write``: see AppendedFile."""
    return AppendedFile(out / EXPERTS, may_write=may_write)


def forget_after(out: Path, step: int) -> Iterator[Row]:
    """Yield the rows up to ``step``, then drop the lines of later steps, which will be repeated, from metrics.jsonl.

    The dropped lines go to metrics.lost.jsonl, so that their cost stays known. OSError if a file cannot be read or written.
    """
    first: int | None = None  # the offset of the first block with later steps
    for name in (NAME, EXPERTS):
        rows.mend(out / name)
    with suppress(FileNotFoundError):
        for block in blocks(out):
            if first is None and _last_step(block) > step:
                first = block.offset
            yield from (row for row in block.rows if row["step"] <= step)
    if first is not None:
        dropped = _cut(out / NAME, step, first, lambda lines: _append(out / LOST, lines))
        log.info("%s: %d lines past step %d are dropped; those steps will be repeated", NAME, dropped, step)


def move_after(out: Path, step: int) -> None:
    """Move the rows past ``step`` to a file metrics.rolled-back-N.jsonl. After a kill, another call completes the move."""
    path = out / NAME
    base = out / "metrics.rolled-back.jsonl"
    files.sweep(base)
    later = files.aside(base)
    first: int | None = None  # the offset of the first block with later steps
    try:
        for block in blocks(out):
            if _last_step(block) > step:
                if first is None:
                    first = block.offset
                _append(later, _later_lines(block, step))
        if first is None:
            return
        files.sync(later)
        for number in itertools.count(1):
            target = out / f"metrics.rolled-back-{number}.jsonl"
            # an attempt that was killed here has written the same file
            if not target.exists() or filecmp.cmp(target, later, shallow=False):
                break
        later.replace(target)
        files.sync(out)
        _cut(path, step, first)
    finally:
        later.unlink(missing_ok=True)


def scores_key(row: Row) -> tuple[int, tuple[str, ...]]:
    """The step and the tasks of a row with scores; no two rows of a run have the same."""
    return row["step"], tuple(sorted(row["tasks"]))


@contextmanager
def scoring(out: Path) -> Iterator[None]:
    """Keep other processes from scoring the run in ``out`` during the block; LockedError if another process scores it."""
    path = out / SCORES
    os.close(files.appending(path))  # the lock would create it with more rights
    busy = LockedError(f"another hpclm evaluate --follow is scoring {out}; wait for it, or end it")
    with files.locked(path, refusal=busy):
        yield


def append_scores(out: Path, step: int, samples: int, time: float, tasks: Mapping[str, Row], checkpoint: str) -> None:
    """Add the scores of a checkpoint, and fsync them. ``checkpoint``: the hash of its manifest."""
    scores = {task: rows.finite(row) for task, row in tasks.items()}
    row = dict(step=step, samples=samples, time=round(time, 3), tasks=scores, checkpoint=checkpoint)
    rows.append(out / SCORES, row)
    files.sync(out / SCORES)


def stream_expert_tokens(out: Path) -> Iterator[Row]:
    """The rows of experts.jsonl; OSError if it cannot be read."""
    fields: dict[str, Kind] = {"step": int, "steps": int, "tokens": are_counts}
    return rows.stream(out / EXPERTS, fields, fields)


def forget_beside_after(out: Path, step: int) -> None:
    """Drop the rows of scores.jsonl and experts.jsonl past ``step``, where the run resumes: it will repeat those steps."""
    for name in (SCORES, EXPERTS):
        with suppress(FileNotFoundError):
            if any(_last_step(block) > step for block in _scan(out / name)):
                _cut(out / name, step)


def copy_scores(out: Path) -> None:
    """Append the scores that metrics.jsonl of a finished run lacks. The caller holds the lease of the run."""
    copied = {scores_key(row) for row in stream(out) if "tasks" in row}
    for row in NewScores(out).rows():
        if scores_key(row) not in copied:
            rows.append(out / NAME, row)


class NewScores:
    """Returns each row of scores.jsonl once."""

    def __init__(self, out: Path):
        self._path = out / SCORES
        self._offset = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows that were added since the last call; all rows at the first call."""
        with suppress(OSError):
            for block in rows.row_blocks(self._path, STEP, ("step", "tasks"), self._offset):
                self._offset = block.end
                yield from block.rows


def _later_lines(block: RowBlock, step: int) -> bytes:
    """The lines of steps after ``step``."""
    return b"".join(line for line, row in block.lines() if row["step"] > step)


def _cut(path: Path, step: int, begin: int = 0, later: Callable[[bytes], object] = lambda lines: None) -> int:
    """Drop the rows past ``step`` after the offset ``begin``, atomically; returns how many. ``later`` receives the dropped lines."""
    files.sweep(path)
    kept = files.aside(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    dropped = 0
    try:
        with files.naming(kept), os.fdopen(files.opened(kept, flags, 0o644), "wb") as file:
            with files.reader(path) as before:
                for part in iter(lambda: before.read(min(rows.BLOCK_BYTES, begin - file.tell())), b""):
                    file.write(part)
            for block in _scan(path, begin=begin):
                keep = [line for line, row in block.lines() if row["step"] <= step]
                if len(keep) < len(block.rows):
                    later(_later_lines(block, step))
                file.writelines(keep)
                dropped += len(block.rows) - len(keep)
            file.flush()
            os.fsync(file.fileno())
        kept.replace(path)
    finally:
        kept.unlink(missing_ok=True)
    files.sync(path.parent)
    return dropped


def _append(path: Path, lines: bytes) -> None:
    with files.naming(path), os.fdopen(files.appending(path), "wb") as file:
        file.write(lines)
