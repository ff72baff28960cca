"""From metrics.jsonl to a sink: whatever the sink lacks, in order."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpclm import files
from hpclm.config import compose
from hpclm.rundir.rows import STEP, parsed
from hpclm.sinks import Row, RunInfo, Sink, lookup, position

BLOCK = 1 << 20  # bytes read at once
MOST = 10_000  # rows that are held at once


class Feed:
    """The rows of a run's metrics.jsonl that a sink lacks, and the sink, made again after failures."""

    def __init__(self, name: str, out: Path, report: Callable[[str], None], next_step: str):
        """``report`` is called for a new failure, and when it is over; ``next_step``: what follows a failure, as text.

        Create one only while holding ``position.lock``.
        """
        self.name, self.out, self.report, self.next_step = name, out, report, next_step
        self.position = position.read(out, name)
        self.sink: Sink | None = None
        self._offset, self._pending, self._rest = 0, list[Row](), b""
        self._failure = ""

    def send(self) -> bool:
        """Send what is new; whether the sink has everything now. A failure is reported once; the next call tries again."""
        try:
            while self._read() or self.sink is None:
                if self.sink is None:
                    self.sink = lookup(self.name)(self._about())
                    position.write(self.out, self.name, self.position)  # its id, before any row is there
                if self._pending:
                    self.sink.send(self._pending, self.position.rows)
                    self.position, self._pending = self.position.after(self._pending), []
                    position.write(self.out, self.name, self.position)
        except Exception as error:
            self._failed(error)
            return False
        if self._failure:
            self.report(f"{self.name}: works again; it has the rows up to step {self.position.step}")
        self._failure = ""
        return True

    def close(self, code: int) -> None:
        """The attempt has ended with ``code``."""
        if self.sink is not None:
            with suppress(Exception):
                self.sink.close(code)

    def _about(self) -> RunInfo:
        settings = compose.flat_of_run(self.out)
        name, project = str(settings.get("name")), str(settings.get("log.project"))
        return RunInfo(self.position.id, name, project, self.out.absolute(), settings)

    def _failed(self, error: Exception) -> None:
        lines = str(error).strip().splitlines()
        failure = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        if failure != self._failure:
            self.report(f"{self.name}: {failure}; {self.next_step}")
        self._failure = failure
        self.close(1)
        self.sink = None

    def _read(self) -> bool:
        """Add the complete new lines of metrics.jsonl to what is pending; whether anything is."""
        with suppress(OSError), files.reader(self.out / "metrics.jsonl") as file:
            file.seek(self._offset)
            while len(self._pending) < MOST and (block := file.read(BLOCK)):
                self._offset += len(block)
                *lines, self._rest = (self._rest + block).split(b"\n")
                rows = (parsed(line.decode(errors="replace"), STEP, ["step"]) for line in lines)
                self._pending += [row for row in rows if row and self.position.is_new(row)]
        return bool(self._pending)
