"""metrics.jsonl, the measurements of a run; no other module opens it. Beside it are scores.jsonl, whose rows are copied there, and
experts.jsonl.

A run of millions of steps has gigabytes of rows, so the files are read in blocks, of which memory holds one at a time.

A line of experts.jsonl has the tokens that each expert got in some steps: {"step": 20, "steps": 10, "time": 1764.2, "tokens":
{"block0": [412, 388, ...], ...}} for the 10 steps up to step 20.

scores.jsonl has the scores of each checkpoint at tasks, from ``hpclm evaluate --follow``: one process writes it, while it has it
locked. Only the run itself writes metrics.jsonl, and appends those scores.
"""

import filecmp
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpclm.base import files
from hpclm.base.errors import LockedError
from hpclm.base.side_path import AppendedFile
from hpclm.rundir import rows
from hpclm.rundir.rows import Kind, Row, RowBlock, all_fit, fits

log = logging.getLogger(__name__)
NAME = "metrics.jsonl"
LOST = "metrics.lost.jsonl"  # lines of metrics.jsonl for steps that a later attempt repeated
SCORES = "scores.jsonl"
EXPERTS = "experts.jsonl"


def are_scores(value: Any) -> bool:
    """Whether ``value`` has scores at tasks: task -> metric -> number, or None where it is not finite."""
    if not isinstance(value, dict) or not all(isinstance(table, dict) for table in value.values()):
        return False
    return all(fits(score, float) for table in value.values() for score in table.values())


def are_counts(value: Any) -> bool:
    """Whether ``value`` has a count for each expert: block -> counts, the same number for every block."""
    lists = list(value.values()) if isinstance(value, dict) else []
    if not lists or not all(isinstance(counts, list) and counts for counts in lists):
        return False
    same = len({*map(len, lists)}) == 1
    return same and all(None not in counts and all_fit(counts, int) for counts in lists)


STEP: dict[str, Kind] = {
    **dict.fromkeys(("step", "samples", "spiking_since"), int),
    **dict.fromkeys(("loss", "validation_loss", "grad_norm", "lr", "loss_scale"), float),
    **dict.fromkeys(("step_seconds", "tokens_per_second", "time"), float),
    "part": str,
    "tasks": are_scores,
}
"""The fields that are read. A row may lack some of them, and may have others."""


def blocks(out: Path, fields: Mapping[str, Kind] = STEP, lost: bool = False) -> Iterator[RowBlock]:
    """The rows of the run in ``out``, in blocks; ``lost``: those of steps that were done again. Errors: see ``rows.row_blocks``."""
    return _scan(out / (LOST if lost else NAME), fields)


def _scan(path: Path, fields: Mapping[str, Kind] = STEP, begin: int = 0) -> Iterator[RowBlock]:
    return rows.row_blocks(path, fields, ("step",), begin)


def _steps(block: RowBlock) -> list[int]:
    """The step of each row."""
    return [row["step"] for row in block.rows]


def stream(out: Path, fields: Mapping[str, Kind] = STEP) -> Iterator[dict[str, Any]]:
    """The rows of the run in ``out``. Errors: see ``rows.row_blocks``."""
    return rows.stream(out / NAME, fields, ["step"])


def last(out: Path, fields: Mapping[str, Kind] = STEP) -> list[dict[str, Any]]:
    """The rows at the end of the file; see ``rows.last``."""
    return rows.last(out / NAME, fields, ["step"])


def added(out: Path, begin: int) -> Iterator[RowBlock]:
    """The rows from the offset ``begin`` on, in blocks. Errors: see ``rows.row_blocks``."""
    return _scan(out / NAME, begin=begin)


def rollbacks(out: Path) -> int:
    """How often rows were moved to another file, because the run went back to an older checkpoint."""
    return sum(1 for _ in out.glob("metrics.rolled-back-*.jsonl"))


def appended(out: Path, may_write: Callable[[], bool]) -> AppendedFile:
    """metrics.jsonl of the run in ``out``, to append to; ``may_write``: see AppendedFile."""
    return AppendedFile(out / NAME, may_write=may_write)


def expert_tokens(out: Path, may_write: Callable[[], bool]) -> AppendedFile:
    """experts.jsonl of the run in ``out``, to append to; ``may_write``: see AppendedFile."""
    return AppendedFile(out / EXPERTS, may_write=may_write)


def remove(out: Path) -> None:
    """Remove the file of the run in ``out``, if there is one."""
    (out / NAME).unlink(missing_ok=True)


def forget_after(out: Path, step: int) -> Iterator[Row]:
    """The rows up to ``step``. When all have been taken, the lines of later steps, which will be repeated, are dropped from the file.

    The dropped lines go to metrics.lost.jsonl, so that their cost stays known. OSError if a file cannot be read or written.
    """
    first: int | None = None
    """The offset of the first block with later steps."""
    for name in (NAME, EXPERTS):
        rows.mend(out / name)
    with suppress(FileNotFoundError):
        for block in blocks(out):
            if first is None and max(_steps(block)) > step:
                first = block.offset
            yield from (row for row in block.rows if row["step"] <= step)
    if first is not None:
        dropped = _cut(out / NAME, step, first, lambda lines: _append(out / LOST, lines))
        log.info("%s: %d lines past step %d are dropped; those steps will be repeated", NAME, dropped, step)


def move_after(out: Path, step: int) -> None:
    """Move the rows past ``step`` to a file metrics.rolled-back-N.jsonl beside it. After a kill, call it again: the result is the same."""
    path = out / NAME
    base = out / "metrics.rolled-back.jsonl"
    files.sweep(base)
    later = files.aside(base)
    first: int | None = None
    """The offset of the first block with later steps."""
    try:
        for block in blocks(out):
            if lines := _later_lines(block, step):
                first = block.offset if first is None else first
                _append(later, lines)
        if first is None:
            return
        files.sync(later)
        number = 1
        while (target := out / f"metrics.rolled-back-{number}.jsonl").exists():
            if filecmp.cmp(target, later, shallow=False):
                break  # written by an attempt that was killed here
            number += 1
        later.replace(target)
        files.sync(out)
        _cut(path, step, first)
    finally:
        later.unlink(missing_ok=True)


def scores_key(row: Row) -> tuple[int, tuple[str, ...]]:
    """The identity of a row with scores: the step and the tasks."""
    return row["step"], tuple(sorted(row["tasks"]))


@contextmanager
def scoring(out: Path) -> Iterator[None]:
    """Keep other processes from scoring the run in ``out`` during the block; LockedError if one does."""
    path = out / SCORES
    os.close(files.appending(path))  # the lock would create it with more rights
    busy = LockedError(f"another hpclm evaluate --follow scores {out}; wait for it, or end it")
    with files.locked(path, refusal=busy):
        yield


def append_scores(out: Path, step: int, samples: int, time: float, tasks: Mapping[str, Row], checkpoint: str) -> None:
    """Add the scores of a checkpoint, which is named by the hash of its manifest; on the disk when this returns."""
    scores = {task: rows.finite(row) for task, row in tasks.items()}
    row = dict(step=step, samples=samples, time=round(time, 3), tasks=scores, checkpoint=checkpoint)
    rows.append(out / SCORES, row)
    files.sync(out / SCORES)


def stream_expert_tokens(out: Path) -> Iterator[Row]:
    """The rows of experts.jsonl; OSError if it cannot be read."""
    fields: dict[str, Kind] = {"step": int, "steps": int, "tokens": are_counts}
    return rows.stream(out / EXPERTS, fields, fields)


def forget_beside_after(out: Path, step: int) -> None:
    """Drop the scores of checkpoints and the tokens of experts past ``step``, where the run resumes: it will do those steps again."""
    for name in (SCORES, EXPERTS):
        with suppress(FileNotFoundError):
            if any(max(_steps(block)) > step for block in _scan(out / name)):
                _cut(out / name, step)


def copy_scores(out: Path) -> None:
    """Append the scores that metrics.jsonl lacks to it, for a run that is done; call it while holding its lease."""
    copied = {scores_key(row) for row in stream(out) if "tasks" in row}
    for row in NewScores(out).rows():
        if scores_key(row) not in copied:
            rows.append(out / NAME, row)


class NewScores:
    """The rows of scores.jsonl, each given once."""

    def __init__(self, out: Path):
        self._path = out / SCORES
        self._offset = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows that were added since the last call; at first all of them."""
        with suppress(OSError):
            for block in rows.row_blocks(self._path, STEP, ("step", "tasks"), self._offset):
                self._offset = block.end
                yield from block.rows


def _later_lines(block: RowBlock, step: int) -> bytes:
    """The lines of steps after ``step``."""
    return b"".join(line for line, row in block.lines() if row["step"] > step)


def _cut(path: Path, step: int, begin: int = 0, later: Callable[[bytes], object] = lambda lines: None) -> int:
    """Drop the rows past ``step`` among the lines from the offset ``begin`` on, atomically; ``later`` gets the lines of later steps.
    Returns how many are dropped. OSError if the file cannot be read or written."""
    files.sweep(path)
    kept = files.aside(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    dropped = 0
    try:
        with files.naming(kept), os.fdopen(files.opened(kept, flags, 0o644), "wb") as file:
            with files.reader(path) as before:
                while part := before.read(min(rows.BLOCK_BYTES, begin - file.tell())):
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
