"""summary.json: how a run stands. Rank 0 keeps it while the run trains; ``hpclm status``, ``hpclm top`` and others read it."""

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hpclm import files
from hpclm.errors import HpclmError
from hpclm.node.secrets import Redactor
from hpclm.rundir import rows, saved
from hpclm.rundir.lease import Lease
from hpclm.rundir.rows import ATTEMPT, Row, maybe

NAME = "summary.json"
ENDED = ("done", "stopped", "exited", "failed")
"""States of a run that has said how it ended; others are "starting" and "running"."""
INTERVAL = 2.0  # seconds between writes
CURVE = 16  # points of a loss curve, at least, if there are so many steps
RECENT = 50  # steps that speed is averaged over
STARTS = 3  # attempts whose first steps are kept
LARGEST = 1 << 20  # bytes
TRACE = "Traceback (most recent call last):"
FIELDS = {
    "state": rows.text,
    "ending": rows.text,
    **dict.fromkeys(("step", "attempts"), rows.whole),
    **dict.fromkeys(("code", "steps", "checkpoint", "validation_step", "spiking_since"), maybe(rows.whole)),
    **dict.fromkeys(("loss", "validation_loss"), maybe(rows.figure)),
    **dict.fromkeys(("time", "stepped", "step_seconds", "tokens_per_second"), maybe(rows.duration)),
    "curve": rows.listed(rows.figure),
    "starts": rows.listed(rows.whole),
    "attempt": lambda value: rows.sane(value, ATTEMPT),
}
NEEDED = ("state", "step", "attempts", "attempt")


def read(out: Path | str) -> Row:
    """The summary of the run in ``out``; empty if there is none, or it is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(files.read_text(f"{out}/{NAME}", LARGEST))
        return content if rows.sane(content, FIELDS, NEEDED) else {}
    return {}


def starts(attempts: Sequence[Row]) -> dict[str, Any]:
    """What a summary says of all attempts: how many there were, and where the last ones began."""
    return {"attempts": len(attempts), "starts": [each.get("from_step") or 0 for each in attempts[-STARTS:]]}


def speed(steps: Sequence[Row]) -> dict[str, Any]:
    """Seconds that a step takes, and tokens a second, over the last steps."""
    names = ("step_seconds", "tokens_per_second")
    measured = [(row[names[0]], row[names[1]]) for row in steps[-RECENT:] if all(row.get(name) for name in names)]
    seconds = sum(each for each, _ in measured)
    tokens = sum(each * rate for each, rate in measured)
    return dict(zip(names, (seconds / len(measured), tokens / seconds) if measured else (None, None), strict=True))


class LossCurve:
    """Evenly spaced losses of a run, at most twice CURVE; of more steps every second one is dropped."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._every, self._count = 1, 0

    def add(self, loss: float | None) -> None:
        """The next step's loss; None if it was not finite."""
        if loss is not None and self._count % self._every == 0:
            self.points.append(round(loss, 4))
            if len(self.points) >= 2 * CURVE:
                del self.points[1::2]
                self._every *= 2
        self._count += 1


class RunSummary:
    """Writes the summary of a run, which this process trains as the holder of ``lease``. Use it as a context manager.

    A failure to write is no failure of the run: what is known is written the next time.
    """

    def __init__(self, out: Path, lease: Lease | None = None):
        self._out, self._lease = out, lease
        self._facts = {"step": 0, "attempts": 0, "attempt": {}, **read(out)}
        self._facts = self._facts | {"state": "starting", "ending": "", "code": None}
        self._recent: list[Row] = []
        self._curve = LossCurve()
        self._lock = threading.Lock()
        self._changed, self._written = True, -INTERVAL

    def __enter__(self) -> "RunSummary":
        files.sweep(self._out / NAME)
        self.write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception) and self._facts["state"] not in ENDED:
            own = isinstance(error, HpclmError)
            self.failed(str(error) if own else f"{type(error).__name__}: {error}", getattr(error, "exit_code", 1))

    def begin(self, attempts: Sequence[Row], steps: int | None) -> None:
        """An attempt begins, the last of ``attempts`` (lines of attempts.jsonl), of a run of ``steps`` in all."""
        attempt = {name: value for name, value in attempts[-1].items() if name in ATTEMPT and name != "hosts"}
        self._facts = self._facts | {
            **starts(attempts),
            "attempt": attempt,
            "steps": steps,
            "step": attempt.get("from_step") or 0,
        }
        self._changed = True
        self.write()

    def resume(self, measured: Sequence[Row]) -> None:
        """``measured``: the rows of metrics.jsonl so far. What earlier attempts knew of later steps is forgotten."""
        kept = ("state", "ending", "code", "step", "steps", "attempt", "attempts", "starts")
        self._facts = {name: value for name, value in self._facts.items() if name in kept}
        for row in measured:
            self._add(row)
        self._recent = []  # speed is this attempt's, whose size or layout may be another one
        self._changed = True

    def measured(self, row: Row) -> None:
        """A step or an evaluation, as a row of metrics.jsonl."""
        first = self._facts["state"] == "starting" and "loss" in row
        self._add(rows.finite(row))
        if first:
            self._facts = self._facts | {"state": "running"}
        self._changed = True
        if first:
            self.write()
        else:
            self.tick()

    def _add(self, row: Row) -> None:
        if "loss" in row:
            self._curve.add(row["loss"])
            self._recent = [*self._recent[1 - RECENT :], row]
            last = {name: row.get(name) for name in ("step", "loss", "spiking_since")}
            self._facts = self._facts | last | {"stepped": row.get("time")}
        elif "validation_loss" in row:
            self._facts = self._facts | {"validation_loss": row["validation_loss"], "validation_step": row["step"]}

    def end(self, state: str, ending: str, code: int) -> None:
        """The run ends, in one of the states ENDED, with this exit code; ``ending`` says how."""
        self._facts = self._facts | {"state": state, "ending": one_line(Redactor()(ending)), "code": code}
        self._changed = True
        self.write()

    def failed(self, text: str, code: int = 1) -> None:
        """The run ends with an error."""
        self.end("failed", text, code)

    def tick(self) -> None:
        """Write what has changed, if the last time is long enough ago."""
        if time.monotonic() - self._written >= INTERVAL:
            self.write()

    def write(self) -> None:
        """Write what has changed since the last time, unless another attempt has taken the run directory over."""
        with self._lock:
            if not self._changed:
                return
            self._changed, self._written = False, time.monotonic()
            newest, _ = saved.survey(self._out / "checkpoints")
            facts = {"time": round(time.time(), 3), **self._facts, "checkpoint": newest and newest[0]}
            if self._recent:
                facts |= speed(self._recent)
            if self._recent or self._curve.points:
                facts["curve"] = self._curve.points
            try:
                if self._lease is None or self._lease.is_mine():
                    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items())
                    files.write_bytes(self._out / NAME, f"{{\n{lines}\n}}\n".encode(), durable=False)
            except OSError:
                self._changed = True


def one_line(text: str) -> str:
    """An error in one line: of a traceback the exception."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if first.endswith(TRACE):
        raised = next((line for line in lines[1:] if not line.startswith(" ")), TRACE)
        first = first.removesuffix(TRACE) + raised
    printable = "".join(char if char.isprintable() else " " for char in first)
    return printable[: rows.LONGEST]
