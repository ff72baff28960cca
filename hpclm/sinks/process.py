"""The processes that send a run's metrics to its sinks, from rank 0's side."""

import json
import logging
import os
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from hpclm import files
from hpclm.errors import REQUEUE
from hpclm.node import python
from hpclm.sinks import messages_of

log = logging.getLogger(__name__)
SECONDS = {0: 30.0, REQUEUE: 5.0}
"""How long the last rows may take, by exit code: a preempted run has no time, and its next attempt sends them."""
FAILED = 2.0  # seconds for the same after an error
SILENT = 2.0  # seconds of that time after which the log says what the run waits for


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
            try:
                (self.out / "logs").mkdir(mode=0o700, exist_ok=True)
                with os.fdopen(files.appending(messages_of(self.out, name), 0o600), "w") as messages:
                    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": messages}
                    process = subprocess.Popen(command, env=python.safe_env(), **pipes)  # type: ignore[call-overload]
            except OSError as error:
                log.warning("sink %s cannot be started: %s; training continues without it", name, error)
                continue
            self._processes[name] = process
            assert process.stdout is not None
            listener = threading.Thread(target=_listen, args=(process.stdout,), name=f"hpclm-sink-{name}", daemon=True)
            listener.start()
            self._listeners.append(listener)

    def __exit__(self, kind: object, *_: object) -> None:
        """Let the sinks have the last rows, as far as there is time."""
        code = self.code if kind is None else 1
        seconds = SECONDS.get(code, FAILED) if kind is None else FAILED
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.write(json.dumps({"code": code, "seconds": seconds}).encode() + b"\n")
                process.stdin.close()
        began = time.monotonic()
        self._say_what_is_late(began + SILENT, seconds)
        until = began + seconds
        for name, process in self._processes.items():
            try:
                complete = process.wait(max(0.0, until - time.monotonic())) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                complete = False
            if not complete:
                text = "sink %s lacks the last rows of metrics.jsonl; the next attempt sends them, or hpclm sync %s; its messages: %s"
                log.warning(text, name, files.typed(self.out), messages_of(self.out, name))
        for listener in self._listeners:
            listener.join(1.0)

    def _say_what_is_late(self, until: float, seconds: float) -> None:
        """Log which sinks are not done at ``until``, of ``time.monotonic``, if they have longer, ``seconds`` in all."""
        late = []
        for name, process in self._processes.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(name)
        if late and seconds > SILENT:
            log.info("waiting up to %.0f s for the last rows to reach %s", seconds, ", ".join(late))


def _listen(stream: IO[bytes]) -> None:
    """Log what a sink's process says."""
    with suppress(OSError), stream:
        for line in stream:
            log.warning("sink %s", line.decode(errors="replace").strip())
