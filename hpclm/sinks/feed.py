"""Send the rows of metrics.jsonl that a sink lacks, in order. The run directory keeps the progress, so that no attempt sends a row
twice."""

import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.base.terminal import many, say
from hpclm.config import compose
from hpclm.rundir import events, metrics_file, rows
from hpclm.sinks import RefusedError, Row, RunInfo, Sink, lookup

MAX_PENDING_ROWS = 10_000  # rows held at once
POSITION: dict[str, rows.Kind] = {
    **{"id": str, "rollbacks": int, "rows": int},
    "steps": lambda steps: isinstance(steps, dict) and all(rows.fits(step, int) for step in steps.values()),
    "refused": int,
    "substitutes": lambda names: isinstance(names, dict) and all(rows.fits(name, str) for name in names.values()),
}
NEEDED = ("id", "rollbacks", "rows", "steps")


def place(out: Path, sink: str, ending: str) -> Path:
    """The sink's file with this ending: the json file holds its position, and the sending process locks the lock file."""
    path = out / "sinks" / f"{sink.replace(':', '-')}.{ending}"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return path


class Feed:
    """The rows of a run's metrics.jsonl that a sink lacks, and the sink, recreated after failures."""

    def __init__(self, name: str, out: Path):
        """The caller must hold the sink's lock."""
        self.name = name
        self.out = out
        self.rollbacks = metrics_file.rollbacks(out)
        self.id = secrets.token_hex(4)
        self.rows = 0
        self.steps = dict[str, int]()
        """Kind of row -> last step sent. ``id`` is the run's id in the sink, and ``rows`` the number of rows sent."""
        self.refused = 0
        """Number of rows that the sink refused."""
        self.substitutes: dict[str, str] = {}
        """Replacements of names that the sink refuses."""
        self.sink: Sink | None = None
        self._offset = 0
        self._pending = list[Row]()
        with suppress(FileNotFoundError):
            text = files.read_text(place(out, name, "json"), errors="replace")
            before = rows.parsed(text, POSITION, NEEDED)
            # otherwise the run has gone back to an older checkpoint, and is a new run in the sink
            if before and before["rollbacks"] == self.rollbacks:
                self.id = before["id"]
                self.rows = before["rows"]
                self.steps = before["steps"]
                self.refused = before.get("refused") or 0
                self.substitutes = before.get("substitutes") or {}

    def send(self, say: Callable[[str], object]) -> None:
        """Send new rows. Raises the sink's exceptions; the next call recreates the sink and sends the same rows.

        ``say``: called with a line about replaced names, and about refused rows, which are omitted.
        """
        try:
            while self._read() or (self.sink is None and self.rows):
                # create the run only for a first row, so that an attempt that fails earlier leaves no empty run
                if self.sink is None:
                    self._keep()  # store the id before the run exists in the sink
                    self.sink = lookup(self.name)(self._run())
                if self._pending:
                    refused = self._send(self.sink, self._pending, self.rows)
                    self.steps |= {kind(row): row["step"] for row in self._pending}
                    self.rows = self.rows + len(self._pending)
                    self._pending = []
                    self.refused += len(refused)
                    if refused:
                        say(f"refused {many(len(refused), 'row')}, omitted there ({refused[0]}); {self.refused} so far")
                    self._say_substitutes(getattr(self.sink, "substitutes", {}), say)
                self._keep()
        except (Exception, SystemExit):
            self.close(1)
            self.sink = None
            raise

    def _send(self, sink: Sink, pending: Sequence[Row], before: int) -> list[str]:
        """Send rows after ``before`` earlier rows. Returns a line for each refused row, with its reason."""
        try:
            sink.send(pending, before)
        except RefusedError as error:
            if len(pending) == 1:
                return [f"step {pending[0]['step']}: {cause(error)}"]
            half = len(pending) // 2
            return self._send(sink, pending[:half], before) + self._send(sink, pending[half:], before + half)
        return []

    def _say_substitutes(self, substitutes: Mapping[str, str], say: Callable[[str], object]) -> None:
        new = {name: other for name, other in substitutes.items() if name not in self.substitutes}
        if new:
            self.substitutes |= new
            say("names that it refuses are replaced there: " + ", ".join(f"{a!r} by {b!r}" for a, b in new.items()))

    def close(self, code: int) -> None:
        """Report the attempt's exit ``code`` to the sink."""
        if self.sink is not None:
            with suppress(Exception, SystemExit):
                self.sink.close(code)

    def _run(self) -> RunInfo:
        settings = compose.flat_of_run(self.out)
        out = self.out.absolute()
        return RunInfo(self.id, out.name, str(settings.get("log.project")), out, settings)

    def _keep(self) -> None:
        position = {"id": self.id, "rollbacks": self.rollbacks, "rows": self.rows, "steps": self.steps}
        position |= {"refused": self.refused, "substitutes": self.substitutes}
        files.write_text(place(self.out, self.name, "json"), json.dumps(position) + "\n")

    def _read(self) -> bool:
        """Add the complete new lines of metrics.jsonl to the pending rows; returns whether any rows are pending. OSError if reading
        fails."""
        with suppress(FileNotFoundError):
            for block in metrics_file.blocks(self.out, begin=self._offset):
                if len(self._pending) >= MAX_PENDING_ROWS:
                    break
                self._offset = block.end
                self._pending += [row for row in block.rows if row["step"] > self.steps.get(kind(row), 0)]
        return bool(self._pending)


def kind(row: Row) -> str:
    """`train`, `tasks` or the evaluated part. Rows of a kind come in the order of their steps."""
    if "tasks" in row:
        return "tasks"
    return str(row.get("part", "valid")) if "validation_loss" in row else "train"


def cause(error: BaseException) -> str:
    """An error of a sink in one line."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def note(out: Path, name: str, cause: str) -> None:
    """Record why the sink ``name`` lacks rows; an empty ``cause`` records that it has all rows again."""
    with suppress(OSError, ConfigError):
        if cause or name in events.unsent(events.read_events(out)):
            events.append(out, "sink", sink=name, cause=cause)


def send_rest(out: Path, name: str) -> None:
    """Send all rows that the sink ``name`` lacks; HpclmError if it fails."""
    lookup(name)
    say(f"{name}: sending the rows that it lacks", file=sys.stderr, flush=True)
    with files.locked(place(out, name, "lock"), f"waiting for the process of {out} that sends to {name}"):
        feed = Feed(name, out)
        before = feed.rows
        refused = feed.refused
        try:
            feed.send(lambda text: say(f"{name}: {text}"))
        except (Exception, SystemExit) as error:
            note(out, name, cause(error))
            raise HpclmError(f"{name}: {cause(error).rstrip('.')}; repeat the command to send the rest") from None
        feed.close(0)
        note(out, name, "")
    step = max(feed.steps.values(), default=0)
    lost = feed.refused - refused
    all_rows = f"everything but {feed.refused} refused rows" if feed.refused else "everything"
    say(f"{name}: {feed.rows - before - lost} rows sent; it has {all_rows} up to step {step}")
