"""The processes that send a run's metrics to its sinks, from rank 0's side."""

import json
import logging
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from hpclm import files
from hpclm.errors import REQUEUE
from hpclm.node import python

log = logging.getLogger(__name__)
SECONDS = {0: 30.0, REQUEUE: 5.0}
"""How long the last rows may take, by exit code: a preempted run has no time, and its next attempt sends them."""
FAILED = 2.0  # seconds for the same after an error


class Sinks:
    """One process for each sink of a run; use it as a context manager. Nothing in it raises or waits while the run trains."""

    def __init__(self, names: list[str], out: Path):
        self.names, self.out = names, out
        self.code = 0
        """How the attempt ends, unless an error ends it."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._listeners: list[threading.Thread] = []

    def __enter__(self) -> "Sinks":
        return self

    def start(self) -> None:
        """Start sending, once metrics.jsonl ends where the run resumes."""
        for name in self.names:
            command = python.command("hpclm.sinks.worker", name, str(self.out))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            try:
                process = subprocess.Popen(command, env=python.safe_env(), **pipes)  # type: ignore[call-overload]
            except OSError as error:
                log.warning("sink %s cannot be started: %s; training continues without it", name, error)
                continue
            self._processes[name] = process
            thread = threading.Thread(target=_listen, args=(process.stdout,), name=f"hpclm-sink-{name}", daemon=True)
            thread.start()
            self._listeners.append(thread)

    def __exit__(self, kind: object, *_: object) -> None:
        """Let the sinks have the last rows, as far as there is time."""
        code, seconds = (self.code, SECONDS.get(self.code, FAILED)) if kind is None else (1, FAILED)
        if self._processes:
            log.info("the last rows have up to %.0f s to reach %s", seconds, ", ".join(self._processes))
        for process in self._processes.values():
            with suppress(OSError):
                process.stdin.write(json.dumps([code, seconds]).encode())  # type: ignore[union-attr]
                process.stdin.close()  # type: ignore[union-attr]
        until = time.monotonic() + seconds
        for name, process in self._processes.items():
            try:
                complete = process.wait(max(0.0, until - time.monotonic())) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                complete = False
            if not complete:
                text = "sink %s lacks the last rows of metrics.jsonl; the next attempt sends them, or hpclm sync %s"
                log.warning(text, name, files.typed(self.out))
        for thread in self._listeners:  # its last lines belong to the log
            thread.join(1.0)


def _listen(stream: IO[bytes]) -> None:
    """Log what a sink's process reports."""
    with suppress(OSError), stream:
        for line in stream:
            log.warning("sink %s", line.decode(errors="replace").strip())
