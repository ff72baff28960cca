"""summary.json: the current state of a run. Rank 0 writes it during training; ``hpclm status``, ``hpclm top`` and others read it."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hpclm.base import files
from hpclm.base.errors import ConfigError, ExitCode, HpclmError
from hpclm.base.side_path import SidePath
from hpclm.node.secrets import Redactor
from hpclm.rundir import events, folder, lease, rows
from hpclm.rundir.folder import survey_checkpoints, unsaved
from hpclm.rundir.lease import Lease
from hpclm.rundir.rows import Row

NAME = "summary.json"
ENDED = ("done", "stopped", "exited", "failed", events.PHASE)
"""States of a run that has recorded its end; the other states are "starting" and "running"."""
KILLED = "ended without a message: killed, or its node failed"
INTERVAL = 2.0  # seconds between writes
CURVE = 16  # minimum points of the loss curve of a run with enough steps
RECENT = 50  # steps over which the speed is averaged
MAX_ENDING = 2000  # characters
TRACE = "Traceback (most recent call last):"
FIELDS: dict[str, rows.Kind] = {
    **dict.fromkeys(("state", "ending"), str),
    **dict.fromkeys(("step", "code", "steps", "checkpoint", "validation_step", "spiking_since"), int),
    "generation": int,
    **dict.fromkeys(("loss", "validation_loss", "time", "stepped", "step_seconds", "tokens_per_second"), float),
    "start_seconds": float,
    "curve": list,
}
NEEDED = ("state", "ending", "step")


def read_summary(out: Path | str) -> Row:
    """The summary of the run in ``out``; empty if it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(files.read_text(f"{out}/{NAME}"))
        return content if rows.sane(content, FIELDS, NEEDED) else {}
    return {}


def failed_without_main(out: Path) -> Callable[[str], None]:
    """A function for ranks other than 0. It records the error that ends the run, if rank 0 could not.

    It records nothing if a later attempt has taken over the run directory.
    """
    holder = lease.holder(out)

    def failed(text: str) -> None:
        if holder.get("token") and lease.holder(out).get("token") == holder["token"]:
            RunSummary(out, generation=holder.get("generation")).failed(text)

    return failed


def _recorded(out: Path, generation: int | None) -> Row:
    """The first event in which a rank recorded the end of the attempt ``generation``; empty without one."""
    if generation is not None:
        with suppress(OSError, ConfigError):
            for event in events.of_kind(events.read_events(out), "ended"):
                if event.get("state") and event.get("generation") == generation:
                    return event
    return {}


class LossCurve:
    """Evenly spaced losses of a run, fewer than twice CURVE: at that number, every second loss is dropped."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._every = 1
        self._count = 0

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

    The first recorded end of an attempt is final, whichever rank records it. A failed write does not end the run.
    """

    def __init__(self, out: Path, lease: Lease | None = None, generation: int | None = None):
        """``generation``: the generation of the lease, if another process holds it."""
        self._out = out
        self._lease = lease
        self.generation = lease.generation if lease else generation
        self._began: float | None = None
        """When this attempt began, once that is recorded."""
        now = {"state": "starting", "ending": "", "code": None, "generation": self.generation}
        self._facts = {"step": 0, **read_summary(out), **now}
        self._recent = deque[tuple[float, float]](maxlen=RECENT)
        self._curve = LossCurve()
        self._lock = threading.Lock()
        self._changed = True
        self._written = -INTERVAL
        self._file = SidePath(f"{out / NAME} cannot be written")
        self._record = SidePath(f"{out / events.NAME} cannot be written")

    def is_mine(self) -> bool:
        """Whether this attempt may still write to the run directory; False once a later attempt has taken over."""
        return self._lease is None or self._lease.is_mine()

    def __enter__(self) -> "RunSummary":
        with suppress(OSError):
            files.sweep(self._out / NAME)
        self.write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.interrupted()
        elif error is not None and self._facts["state"] not in ENDED:
            text = str(error)
            if not isinstance(error, HpclmError):
                text = f"{type(error).__name__}: {error}".removesuffix(": ")
            self.failed(text, getattr(error, "exit_code", ExitCode.FAILED))

    def begin(self, began: Row, steps: int | None) -> None:
        """Note the beginning of an attempt, from its event ``began``. ``steps``: the planned number of steps of the run."""
        self._began = began.get("began")
        self._know(steps=steps, step=began.get("from_step") or 0)
        self.write()

    def resume(self, measured: Iterable[Row]) -> None:
        """Begin with the rows of metrics.jsonl so far, ``measured``, and forget what earlier attempts knew of later steps."""
        kept = ("state", "ending", "code", "step", "steps", "generation", "start_seconds")
        self._facts = {name: value for name, value in self._facts.items() if name in kept}
        step: Row = {}
        evaluation: Row = {}
        for row in measured:
            if "loss" in row:
                self._curve.add(row["loss"])
                step = row
            elif "validation_loss" in row:
                evaluation = row
        self._stepped(step)
        self._evaluated(evaluation)
        self._changed = True

    def measured(self, row: Row) -> None:
        """Add a step or an evaluation, given as a row of metrics.jsonl."""
        first = self._facts["state"] == "starting" and "loss" in row
        self._add(rows.finite(row))
        if first:
            self._know(state="running", **self._start_seconds(row.get("time"), row.get("step_seconds")))
            self.write()
        else:
            self._changed = True
            self.tick()

    def _add(self, row: Row) -> None:
        if "loss" in row:
            self._curve.add(row["loss"])
            seconds = row.get("step_seconds")
            rate = row.get("tokens_per_second")
            if seconds and rate:
                self._recent.append((seconds, seconds * rate))
            self._stepped(row)
        elif "validation_loss" in row:
            self._evaluated(row)

    def _stepped(self, row: Row) -> None:
        if row:
            last = {name: row.get(name) for name in ("step", "loss", "spiking_since")}
            if row.get("counted_tokens") == 0:  # the step has no loss: keep the loss of the step before
                del last["loss"]
            self._know(**last, stepped=row.get("time"))

    def _evaluated(self, row: Row) -> None:
        if row:
            self._know(validation_loss=row["validation_loss"], validation_step=row["step"])

    def _know(self, **facts: Any) -> None:
        self._facts = {**self._facts, **facts}  # replaced, since another thread may be writing them

    def end(self, state: str, ending: str, code: int, over: bool = False) -> bool:
        """Record the end of the run: a state of ENDED, its description ``ending`` and the exit code. False if an end is recorded already.

        ``over``: the run has done everything that its settings ask for.
        """
        self._adopt_ending()
        if self._facts["state"] in ENDED:
            return False
        if self._facts["state"] == "starting":
            self._know(**self._start_seconds(time.time()))
        end = {"state": state, "ending": one_line(Redactor()(ending)), "code": code}
        self._know(**end)
        self._record.attempt(lambda: self._append({**end, "over": over}), now=True)
        self.write()
        return True

    def _append(self, end: Row) -> None:
        if self.is_mine():
            events.append(self._out, "ended", **end, step=self._facts["step"], generation=self.generation)
        if end["state"] != "failed":
            folder.sync(self._out)

    def _start_seconds(self, now: float | None, step: float | None = 0.0) -> Row:
        """Seconds from this attempt's beginning to ``now``, without its first step, which took ``step`` seconds."""
        if not (now and self._began):
            return {}
        return {"start_seconds": round(max(0.0, now - self._began - (step or 0.0)), 1)}

    def _adopt_ending(self) -> None:
        """Take over the end that another rank has recorded because this rank did not respond."""
        if self._facts["state"] not in ENDED:
            recorded = _recorded(self._out, self.generation)
            if recorded:
                self._know(**{name: recorded.get(name) for name in ("state", "ending", "code")})

    def failed(self, text: str, code: int = ExitCode.FAILED) -> None:
        """Record that the run ends with the error ``text``."""
        self.end("failed", text, code)

    def interrupted(self) -> str:
        """Record an end by an interrupt; returns a text for the log, empty if an end is recorded already."""
        ending = f"interrupted: {unsaved(self._out)}, exiting"
        return ending if self.end("exited", ending, ExitCode.INTERRUPTED) else ""

    def tick(self) -> None:
        """Write the summary if it has changed and the last write was INTERVAL seconds ago or longer."""
        if self._changed and time.monotonic() - self._written >= INTERVAL:
            self.write()

    def write(self) -> None:
        """Write the summary, unless another attempt has taken over the run directory."""
        with self._lock:
            self._adopt_ending()
            self._changed = False
            self._written = time.monotonic()
            newest, _ = survey_checkpoints(self._out / "checkpoints")
            facts: dict[str, Any] = {**self._facts, "time": round(time.time(), 3), "checkpoint": newest and newest[0]}
            recent = list(self._recent)
            if recent:
                seconds, tokens = map(sum, zip(*recent, strict=True))
                facts |= {"step_seconds": seconds / len(recent), "tokens_per_second": tokens / seconds}
            if recent or self._curve.points:
                facts["curve"] = list(self._curve.points)

            def act() -> None:
                if self.is_mine():
                    files.write_bytes(self._out / NAME, json.dumps(facts, indent=1).encode() + b"\n", durable=False)

            self._changed = not self._file.attempt(act, now=True)


def one_line(text: str) -> str:
    """``text`` in one line: the exception of a traceback, otherwise the first line."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()] or [""]
    first = lines[0]
    if first.endswith(TRACE):
        first = first.removesuffix(TRACE) + next((line for line in lines[1:] if not line.startswith(" ")), TRACE)
    return "".join(char if char.isprintable() else " " for char in first)[:MAX_ENDING]
