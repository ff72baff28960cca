"""summary.json: how a run stands. Rank 0 keeps it while the run trains; ``hpclm status``, ``hpclm top`` and others read it."""

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
ENDED = ("done", "stopped", "exited", "failed")
"""States of a run that has said how it ended; others are "starting" and "running"."""
KILLED = "ended without a message: killed, or its node failed"
INTERVAL = 2.0  # seconds between writes
CURVE = 16  # fewest points of a loss curve of a run with enough steps
RECENT = 50  # steps that speed is averaged over
MAX_ENDING = 2000  # characters
TRACE = "Traceback (most recent call last):"
FIELDS: dict[str, rows.Kind] = {
    **dict.fromkeys(("state", "ending", "experts"), str),
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
    """A function for other ranks than 0. It records the error that ends the run, if rank 0 could not.

    It records nothing if a later attempt has taken the run directory over.
    """
    holder = lease.holder(out)

    def failed(text: str) -> None:
        if holder.get("token") and lease.holder(out).get("token") == holder["token"]:
            RunSummary(out, generation=holder.get("generation")).failed(text)

    return failed


def _recorded(out: Path, generation: int | None) -> Row:
    """How the attempt of this generation has ended, as the first rank that knew has recorded it; empty if none has."""
    with suppress(OSError, ConfigError):
        for event in events.read_events(out) if generation is not None else ():
            if event["kind"] == "ended" and event.get("state") and event.get("generation") == generation:
                return event
    return {}


class LossCurve:
    """Evenly spaced losses of a run, at most twice CURVE; of more steps every second one is dropped."""

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

    The first ending of an attempt is final, whichever rank records it. A failure to write is not a failure of the run: what is known
    is written next time.
    """

    def __init__(self, out: Path, lease: Lease | None = None, generation: int | None = None):
        """``generation``: of the lease, where another process holds it."""
        self._out = out
        self._lease = lease
        self.generation = lease.generation if lease else generation
        self._began: float | None = None
        """When this attempt began, once it has been recorded."""
        self._facts = {
            "step": 0,
            **read_summary(out),
            "state": "starting",
            "ending": "",
            "code": None,
            "generation": self.generation,
        }
        self._recent = deque[tuple[float, float]](maxlen=RECENT)
        self._curve = LossCurve()
        self._lock = threading.Lock()
        self._changed = True
        self._written = -INTERVAL
        self._file = SidePath(f"{out / NAME} cannot be written")
        self._record = SidePath(f"{out / events.NAME} cannot be written")

    def is_mine(self) -> bool:
        """Whether this attempt may still write to the run directory: no later one has taken it over."""
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
            text = (
                str(error) if isinstance(error, HpclmError) else f"{type(error).__name__}: {error}".removesuffix(": ")
            )
            self.failed(text, getattr(error, "exit_code", ExitCode.FAILED))

    def begin(self, began: Row, steps: int | None) -> None:
        """An attempt begins, as this event says, of a run of ``steps`` in all."""
        self._began = began.get("began")
        self._know(steps=steps, step=began.get("from_step") or 0)
        self.write()

    def resume(self, measured: Iterable[Row]) -> None:
        """``measured``: the rows of metrics.jsonl so far. What earlier attempts knew of later steps is forgotten."""
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
        """A step or an evaluation, as a row of metrics.jsonl."""
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
            if row.get("counted_tokens") == 0:  # it has no loss: the last one that a step had stays
                del last["loss"]
            self._know(**last, stepped=row.get("time"))

    def _evaluated(self, row: Row) -> None:
        if row:
            self._know(validation_loss=row["validation_loss"], validation_step=row["step"])

    def note_experts(self, text: str) -> None:
        """A problem with the load of experts; empty if it is solved."""
        self._know(experts=text)
        self._changed = True

    def _know(self, **facts: Any) -> None:
        self._facts = {**self._facts, **facts}  # replaced, since another thread may be writing them

    def end(self, state: str, ending: str, code: int, over: bool = False) -> bool:
        """The run ends, in one of the states ENDED, with this exit code; ``ending`` says how. False if it had ended before.

        ``over``: it has done all that its settings ask for.
        """
        self._adopt_ending()
        if self._facts["state"] in ENDED:
            return False
        started = self._start_seconds(time.time()) if self._facts["state"] == "starting" else {}
        end = {"state": state, "ending": one_line(Redactor()(ending)), "code": code}
        self._know(**end, **started)
        self._record.attempt(lambda: self._append({**end, "over": over}), now=True)
        self.write()
        return True

    def _append(self, end: Row) -> None:
        if self.is_mine():
            events.append(self._out, "ended", **end, step=self._facts["step"], generation=self.generation)
        if end["state"] != "failed":
            folder.sync(self._out)

    def _start_seconds(self, now: float | None, step: float | None = 0.0) -> Row:
        """The seconds that this attempt's start took, if it is over ``now``, without the ``step`` seconds of its first step."""
        began = self._began
        return {"start_seconds": round(max(0.0, now - began - (step or 0.0)), 1)} if now and began else {}

    def _adopt_ending(self) -> None:
        """Keep what another rank has recorded of this attempt's end, when this one did not respond."""
        if self._facts["state"] in ENDED:
            return
        recorded = _recorded(self._out, self.generation)
        if recorded:
            self._know(**{name: recorded.get(name) for name in ("state", "ending", "code")})

    def failed(self, text: str, code: int = ExitCode.FAILED) -> None:
        """The run ends with an error."""
        self.end("failed", text, code)

    def interrupted(self) -> str:
        """The run ends at once, by a second interrupt or one before its first step; how, for the log. Empty if it had ended before."""
        ending = f"interrupted: {unsaved(self._out)}, exiting"
        return ending if self.end("exited", ending, ExitCode.INTERRUPTED) else ""

    def tick(self) -> None:
        """Write what has changed, if the last time is long enough ago."""
        if self._changed and time.monotonic() - self._written >= INTERVAL:
            self.write()

    def write(self) -> None:
        """Write what is known, unless another attempt has taken the run directory over."""
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
    """An error in one line: of a traceback the exception."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()] or [""]
    first = lines[0]
    if first.endswith(TRACE):
        first = first.removesuffix(TRACE) + next((line for line in lines[1:] if not line.startswith(" ")), TRACE)
    return "".join(char if char.isprintable() else " " for char in first)[:MAX_ENDING]
