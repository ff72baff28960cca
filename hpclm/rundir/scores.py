"""scores.jsonl: the scores of each checkpoint at tasks, written by ``hpclm evaluate --follow``.

One process writes it, while it holds scores.lock. The run copies its rows to metrics.jsonl, which only the run itself writes.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.rundir import metrics_file, rows

FILE, LOCK = "scores.jsonl", "scores.lock"
Row = Mapping[str, Any]


def key(row: Row) -> tuple[int, tuple[str, ...]]:
    """What a row measures: the step, and its tasks."""
    return row["step"], tuple(sorted(row["tasks"]))


def append(out: Path, step: int, samples: int, time: float, tasks: Mapping[str, Row], checkpoint: str) -> None:
    """Add the scores of a checkpoint, which is named by the hash of its manifest; on the disk when this returns."""
    scores = {task: rows.finite(row) for task, row in tasks.items()}
    row = dict(step=step, samples=samples, time=round(time, 3), tasks=scores, checkpoint=checkpoint)
    rows.append(out / FILE, row)
    files.sync(out / FILE)


def forget_after(out: Path, step: int) -> None:
    """Drop the rows of checkpoints past ``step``, where the run resumes: it will save those steps again."""
    path = out / FILE
    with suppress(FileNotFoundError):
        if not all(block.is_until(step) for block in metrics_file.scan(path, ("step",))):
            metrics_file.cut(path, step)


def copy(out: Path) -> None:
    """Append the rows of scores.jsonl that metrics.jsonl lacks to it, for a run that is done; call it while holding its lease."""
    path = out / metrics_file.NAME
    parts = (part for block in metrics_file.scan(path, ("step",)) for part in block.parts)
    copied = {key(part) for part in parts if isinstance(part, dict) and "tasks" in part}
    for row in Scores(out).new():
        if key(row) not in copied:
            rows.append(path, row)


def _row(line: bytes) -> dict[str, Any] | None:
    return rows.parsed(line.decode(errors="replace"), rows.STEP, ["step", "tasks"])


class Scores:
    """The rows of scores.jsonl, each given once."""

    def __init__(self, out: Path):
        self.path = out / FILE
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Rows that were added since the last call; at first all of them."""
        with suppress(OSError):
            for offset, lines in rows.blocks(self.path, self._offset):
                if not lines.endswith(b"\n"):  # it is being written
                    return
                self._offset = offset + len(lines)
                yield from filter(None, map(_row, io.BytesIO(lines)))
