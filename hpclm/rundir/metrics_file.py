"""metrics.jsonl, what a run measures; nothing else opens it. With it scores.jsonl, whose rows are copied there, and experts.jsonl.

A run of millions of steps has gigabytes of rows, of which each reader needs a few figures, so the file is read as a stream. Rows
of steps are read by a regular expression for the fields that they have in this file, in their order, in a fraction of the time
that JSON takes. Every line that it does not match is read as JSON and checked.

A line of experts.jsonl has the tokens that went to each expert in some steps: {"step": 20, "steps": 10, "time": 1764.2, "tokens":
{"block0": [412, 388, ...], ...}}, of the 10 steps up to step 20.

scores.jsonl has the scores of each checkpoint at tasks, from ``hpclm evaluate --follow``: one process writes it, while it has it
locked. Only the run itself writes metrics.jsonl, and appends those scores.
"""

import filecmp
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.errors import ConfigError, LockedError
from hpclm.rundir import rows
from hpclm.rundir.rows import Kind, Row, fits
from hpclm.side_path import AppendedFile

log = logging.getLogger(__name__)
NAME = "metrics.jsonl"
LOST = "metrics.lost.jsonl"  # lines of metrics.jsonl whose steps a later attempt did again
SCORES = "scores.jsonl"
EXPERTS = "experts.jsonl"
INTEGER = rb"0|[1-9]\d{0,14}"
FLOAT = rb"-?(?:0|[1-9]\d{0,19})(?:\.\d{1,25})?(?:[eE][-+]?\d{1,2})?"
"""Numbers that ``rows.fits`` accepts whatever their value."""
NULL = b"null"


def are_scores(value: Any) -> bool:
    """Whether ``value`` has scores at tasks: task -> metric -> number, or None where it is not finite."""
    tables = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(table, dict) and all(fits(score, float) for score in table.values()) for table in tables)


def are_counts(value: Any) -> bool:
    """Whether ``value`` has counts for experts: block -> a count for each, of which every block has as many."""
    lists = [*value.values()] if isinstance(value, dict) else []
    alike = all(isinstance(counts, list) and len(counts) == len(lists[0]) > 0 for counts in lists)
    return (
        alike
        and bool(lists)
        and all({*map(type, counts)} == {int} and fits(min(counts), int) and fits(max(counts), int) for counts in lists)
    )


STEP: dict[str, Kind] = {
    **dict.fromkeys(("step", "samples", "spiking_since"), int),
    **dict.fromkeys(("loss", "validation_loss", "grad_norm", "lr", "loss_scale"), float),
    **dict.fromkeys(("step_seconds", "tokens_per_second", "time"), float),
    "part": str,
    "tasks": are_scores,
}
"""The fields that are read. A row may lack some of them, and may have others."""


@dataclass(frozen=True)
class StepRows:
    """Rows of steps that follow each other, as text: each value is a number or null."""

    names: tuple[str, ...]
    values: Sequence[tuple[bytes, ...]]
    """For each row the values of ``names``, in this order."""

    @property
    def steps(self) -> list[int]:
        """The number of each step."""
        return list(map(int, self.texts("step")))

    def column(self, name: str) -> list[float]:
        """The values of ``name``; NaN for null, and where the rows have no such field."""
        if name not in self.names:
            return [float("nan")] * len(self.values)
        values = self.texts(name)
        if NULL in values:
            return [float("nan") if value == NULL else float(value) for value in values]
        return list(map(float, values))

    def texts(self, name: str) -> list[bytes]:
        """The values of ``name``, one of ``names``."""
        place = self.names.index(name)
        return [row[place] for row in self.values]

    def last(self, count: int) -> list[dict[str, Any]]:
        """The last ``count`` rows, with the fields ``names``."""
        return [dict(zip(self.names, map(json.loads, row), strict=False)) for row in self.values[-count:]]

    def until(self, step: int) -> "StepRows":
        """The rows up to ``step``."""
        pairs = zip(self.values, self.steps, strict=True)
        return StepRows(self.names, [row for row, number in pairs if number <= step])


@dataclass(frozen=True)
class Block:
    """Some lines of a file."""

    offset: int
    lines: bytes
    parts: Sequence[StepRows | Row]
    """Their rows in order."""

    @cached_property
    def steps(self) -> list[int]:
        """The step of each line."""
        steps: list[int] = []
        for part in self.parts:
            steps += part.steps if isinstance(part, StepRows) else [part["step"]]
        return steps

    def is_until(self, step: int) -> bool:
        """Whether each line is a row up to ``step``."""
        return max(self.steps, default=0) <= step


@dataclass(frozen=True)
class Layout:
    """Reads rows of steps that have the same fields in the same order."""

    names: tuple[str, ...]
    pattern: re.Pattern[bytes]
    """Matches a row, with a group for each of ``names``, or any other line, which is the last group."""

    @classmethod
    def of(cls, row: Row, names: Sequence[str], fields: Mapping[str, Kind]) -> "Layout | None":
        """The layout of ``row``, of which the values of ``names`` are needed; None unless it is that of a step with a loss and has
        only numbers."""
        kinds = {key: fields.get(key, float) for key in row}
        numbers = all(value is None or type(value) in (int, float) for value in row.values())
        if "loss" not in row or "counted_tokens" in row or not numbers or not set(kinds.values()) <= {int, float}:
            return None
        values = []
        for key, kind in kinds.items():
            number = (INTEGER if kind is int else FLOAT) + b"|null" * (key != "step")
            group = b"(" if key in names else b"(?:"
            values.append(re.escape(json.dumps(key).encode()) + b": " + group + number + b")")
        pattern = rb"\{" + b", ".join(values) + rb"\}\n|([^\n]*\n)"
        return cls(tuple(key for key in row if key in names), re.compile(pattern))

    def parts(self, lines: bytes, fields: Mapping[str, Kind]) -> Iterator[StepRows | Row | None]:
        """The rows in ``lines``; None for a line that is not valid."""
        matches, begin = self.pattern.findall(lines), 0
        for number in [number for number, match in enumerate(matches) if match[-1]]:
            if begin < number:
                yield StepRows(self.names, matches[begin:number])
            yield rows.parsed(matches[number][-1], fields, ("step",))
            begin = number + 1
        if begin < len(matches):
            yield StepRows(self.names, matches[begin:])


def scan(path: Path, names: Sequence[str], fields: Mapping[str, Kind] = STEP, begin: int = 0) -> Iterator[Block]:
    """The lines of the file from the offset ``begin`` on, with their rows; of usual rows of steps only the fields ``names``,
    step among them. OSError if the file cannot be read, ConfigError if a line is damaged."""
    layout: Layout | None = None
    for offset, lines in rows.blocks(path, begin):
        if layout is None:
            valid = filter(None, (rows.parsed(line, fields, ("step",)) for line in _split(lines)))
            layout = next(filter(None, (Layout.of(row, names, fields) for row in valid)), None)
        read = (
            layout.parts(lines, fields) if layout else (rows.parsed(line, fields, ("step",)) for line in _split(lines))
        )
        parts = [part for part in read if part is not None]
        if sum(len(part.values) if isinstance(part, StepRows) else 1 for part in parts) < lines.count(b"\n"):
            raise _damaged(path, offset, lines, fields)
        yield Block(offset, lines, parts)
        unusual = [part for part in parts if isinstance(part, dict) and "loss" in part]
        if sum(len(part.values) for part in parts if isinstance(part, StepRows)) < len(unusual):
            layout = Layout.of(unusual[-1], names, fields)


def blocks(out: Path, names: Sequence[str], fields: Mapping[str, Kind], lost: bool = False) -> Iterator[Block]:
    """The lines of the run in ``out``, as ``scan`` gives them; ``lost``: those whose steps were done again."""
    return scan(out / (LOST if lost else NAME), names, fields)


def stream(out: Path, fields: Mapping[str, Kind] = STEP) -> Iterator[dict[str, Any]]:
    """The rows of the run in ``out``, with all of their fields; OSError if the file cannot be read."""
    return rows.stream(out / NAME, fields, ["step"])


def last(out: Path, fields: Mapping[str, Kind] = STEP) -> list[dict[str, Any]]:
    """The last rows, as many as the end of the file has; none if it cannot be read."""
    return rows.last(out / NAME, fields, ["step"])


def added(out: Path, begin: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The rows from the offset ``begin`` on, some at a time, each time with the offset after them; OSError if the file cannot be
    read."""
    return _added(out / NAME, begin, ["step"])


def rollbacks(out: Path) -> int:
    """How often rows were moved to a file of their own, since the run went back to an older checkpoint."""
    return sum(1 for _ in out.glob("metrics.rolled-back-*.jsonl"))


def appended(out: Path) -> AppendedFile:
    """The file of the run in ``out``, to append to."""
    return AppendedFile(out / NAME)


def remove(out: Path) -> None:
    """Remove the file of the run in ``out``, if there is one."""
    (out / NAME).unlink(missing_ok=True)


def forget_after(out: Path, step: int) -> Iterator[Row]:
    """The rows up to ``step``: evaluations, scores, and of steps ``step`` and ``loss``, with ``time`` and ``spiking_since`` at
    least in the last one. When all have been taken, the lines of later steps, which will be repeated, are dropped from the file.

    What later steps cost stays known: their lines go to metrics.lost.jsonl. OSError if the file cannot be read or written.
    """
    path = out / NAME
    first: int | None = None
    """Where the first block begins of which lines are dropped."""
    for name in (NAME, EXPERTS):
        rows.mend(out / name)
    with suppress(FileNotFoundError):
        for block in scan(path, ("step", "loss", "time", "spiking_since")):
            late = not block.is_until(step)
            first = block.offset if late and first is None else first
            for part in block.parts:
                if isinstance(part, StepRows):
                    yield from _losses(part.until(step) if late else part)
                elif part["step"] <= step:
                    yield part
    if first is not None:
        dropped = _cut(path, step, first, lambda lines: _append(out / LOST, lines))
        log.info("%s: %d lines past step %d are dropped; those steps will be repeated", path.name, dropped, step)


def move_after(out: Path, step: int) -> None:
    """Move the rows past ``step`` to a file metrics.rolled-back-N.jsonl beside it; again after a kill, with the same result."""
    path, base = out / NAME, out / "metrics.rolled-back.jsonl"
    first: int | None = None
    files.sweep(base)
    later = files.aside(base)
    try:
        for block in scan(path, ("step",)):
            if not block.is_until(step):
                first = block.offset if first is None else first
                _append(later, b"".join(line for line, at in _lines(block) if at > step))
        if first is None:
            return
        if later.exists():
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
    """What a row with scores measures: the step, and its tasks."""
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


def expert_tokens(out: Path) -> AppendedFile:
    """experts.jsonl of the run in ``out``, to append to."""
    return AppendedFile(out / EXPERTS)


def stream_expert_tokens(out: Path) -> Iterator[Row]:
    """The rows of experts.jsonl; OSError if it cannot be read."""
    fields: dict[str, Kind] = {"step": int, "steps": int, "tokens": are_counts}
    return rows.stream(out / EXPERTS, fields, fields)


def forget_beside_after(out: Path, step: int) -> None:
    """Drop the scores of checkpoints and the tokens of experts past ``step``, where the run resumes: it will do those steps again."""
    for name in (SCORES, EXPERTS):
        with suppress(FileNotFoundError):
            if not all(block.is_until(step) for block in scan(out / name, ("step",))):
                _cut(out / name, step)


def copy_scores(out: Path) -> None:
    """Append the scores that metrics.jsonl lacks to it, for a run that is done; call it while holding its lease."""
    parts = (part for block in scan(out / NAME, ("step",)) for part in block.parts)
    copied = {scores_key(part) for part in parts if isinstance(part, dict) and "tasks" in part}
    for row in NewScores(out).rows():
        if scores_key(row) not in copied:
            rows.append(out / NAME, row)


class NewScores:
    """The rows of scores.jsonl, each given once."""

    def __init__(self, out: Path):
        self._path, self._offset = out / SCORES, 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows that were added since the last call; at first all of them."""
        with suppress(OSError):
            for end, added in _added(self._path, self._offset, ["step", "tasks"]):
                self._offset = end
                yield from added


def _added(path: Path, begin: int, needs: Sequence[str]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The rows from the offset ``begin`` on, some at a time, each time with the offset after them."""
    for offset, lines in rows.blocks(path, begin):
        read = [rows.parsed(line, STEP, needs) for line in _split(lines)]
        if None in read:
            raise _damaged(path, offset, lines, STEP, needs)
        yield offset + len(lines), [row for row in read if row]


def _cut(path: Path, step: int, begin: int = 0, later: Callable[[bytes], object] = lambda lines: None) -> int:
    """Keep of the lines from the offset ``begin`` on only rows up to ``step``, atomically; ``later`` gets the lines of later
    steps. Returns how many are dropped. OSError if the file cannot be read or written."""
    files.sweep(path)
    dropped, kept, flags = 0, files.aside(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with files.naming(kept), os.fdopen(files.opened(kept, flags, 0o644), "wb") as file:
            with files.reader(path) as before:
                while part := before.read(min(rows.BLOCK_BYTES, begin - file.tell())):
                    file.write(part)
            for block in scan(path, ("step",), begin=begin):
                lines = _lines(block)
                keep = [line for line, number in lines if number <= step]
                if lost := b"".join(line for line, number in lines if number > step):
                    later(lost)
                file.write(b"".join(keep))
                dropped += len(lines) - len(keep)
            file.flush()
            os.fsync(file.fileno())
        kept.replace(path)
    finally:
        kept.unlink(missing_ok=True)
    files.sync(path.parent)
    return dropped


def _losses(part: StepRows) -> Iterator[Row]:
    for step, loss in zip(part.steps[:-1], part.column("loss"), strict=False):
        yield {"step": step, "loss": None if loss != loss else loss}
    yield from part.last(1)


def _lines(block: Block) -> list[tuple[bytes, int]]:
    """The lines of ``block``, each with its step."""
    return list(zip(_split(block.lines), block.steps, strict=True))


def _split(lines: bytes) -> list[bytes]:
    return [line + b"\n" for line in lines.split(b"\n")[:-1]]


def _append(path: Path, lines: bytes) -> None:
    with files.naming(path), os.fdopen(files.appending(path), "wb") as file:
        file.write(lines)


def _damaged(
    path: Path, offset: int, lines: bytes, fields: Mapping[str, Kind], needs: Sequence[str] = ("step",)
) -> ConfigError:
    """The error for the first of ``lines``, which begin at ``offset``, that is not valid."""
    for line in _split(lines):
        if rows.parsed(line, fields, needs) is None:
            break
        offset += len(line)
    return rows.damaged(path, offset)
