"""scores.jsonl: the scores of each checkpoint at tasks, written by ``hpclm evaluate --follow``.

One process writes it, while it holds scores.lock. The run copies its rows to metrics.jsonl, which only the run itself writes.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.rundir import rows

FILE, LOCK = "scores.jsonl", "scores.lock"
LARGEST = 1 << 28  # bytes of scores.jsonl
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
    with suppress(FileNotFoundError):
        lines = files.read_text(out / FILE, LARGEST, errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if (row := _row(line)) and row["step"] <= step]
        if len(kept) < len(lines):
            files.write_text(out / FILE, "".join(kept))


def _row(line: str) -> dict[str, Any] | None:
    return rows.parsed(line, rows.STEP, ["step", "tasks"])


class Scores:
    """The rows of scores.jsonl, each given once."""

    def __init__(self, out: Path):
        self.path = out / FILE
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Rows that were added since the last call; at first all of them."""
        content = b""
        with suppress(OSError):
            if self.path.stat().st_size > self._offset:
                content = files.read(self.path, LARGEST)[0][self._offset :]
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):  # it is being written
                return
            self._offset += len(line)
            if (row := _row(line.decode(errors="replace"))) is not None:
                yield row
