"""Rank 0's control of the processes that send a run's metrics to its sinks."""

import logging
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import ExitCode
from hpclm.node import python
from hpclm.sinks.feed import note

log = logging.getLogger(__name__)
SECONDS: Mapping[int, float] = {ExitCode.DONE: 30.0, ExitCode.REQUEUE: 5.0}
"""Exit code -> seconds for the last rows. A preempted run has little time, and its next attempt sends them."""
FAILED = 2.0  # seconds for the last rows after an error


class Sinks:
    """One process for each sink of a run, as a context manager. It never raises or waits while the run trains."""

    def __init__(self, names: list[str], out: Path):
        self.names = names
        self.out = out
        self.code = 0
        """Exit code of the attempt, unless an error ends it."""
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> "Sinks":
        return self

    def start(self) -> None:
        """Start sending. Call it after metrics.jsonl has been cut to the step from which the run resumes."""
        for name in self.names:
            command = python.command("hpclm.sinks.worker", name, str(self.out))
            nothing = subprocess.DEVNULL
            pipes = {"stdin": subprocess.PIPE, "stdout": nothing, "stderr": nothing}
            try:
                self._processes[name] = subprocess.Popen(command, env=python.safe_env(), text=True, **pipes)  # type: ignore
            except OSError as error:
                log.warning("sink %s cannot be started: %s; training continues without it", name, error)

    def __exit__(self, kind: object, *_: object) -> None:
        """Send the last rows to the sinks within the time limit."""
        code = self.code if kind is None else ExitCode.FAILED
        seconds = SECONDS.get(code, FAILED)
        if self._processes:
            log.info("sending the last rows to %s, at most %.0f s", ", ".join(self._processes), seconds)
        for process in self._processes.values():
            with suppress(OSError):
                process.stdin.write(str(code))  # type: ignore[union-attr]
                process.stdin.close()  # type: ignore[union-attr]
        until = time.monotonic() + seconds
        for name, process in self._processes.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            ended = process.poll()
            if ended is None:
                note(self.out, name, f"the last rows took longer than {seconds:.0f} s")
            elif ended not in (0, 1):  # with code 1, the process itself has recorded the reason
                note(self.out, name, f"its process ended with {ended}")
            if ended != 0:
                process.kill()
                process.wait()
                text = "sink %s could not send the last rows of metrics.jsonl; the next attempt sends them, or hpclm sync %s"
                log.warning(text, name, files.typed(self.out))
