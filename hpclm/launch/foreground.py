"""A launch in the foreground: its record, its log, and mpirun or srun run to its end."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from hpclm import files
from hpclm.config import RunConfig
from hpclm.errors import REQUEUE
from hpclm.launch import kill_with_launcher
from hpclm.node import environment, preemption, processes
from hpclm.rundir import submissions
from hpclm.rundir.submissions import Submission
from hpclm.terminal import say


def begin(
    config: RunConfig, name: str, shape: tuple[int, int], notes: Sequence[str] = (), command: Sequence[str] = ()
) -> Path:
    """Make the run directory, record the launch, and log its ``notes``; the path of its log.

    ``shape``: nodes, and the most ranks on one; ``command``: what the user typed.
    """
    out = files.private_folder(config.out, "run directory")
    logs = files.private_folder(out / "logs", "log folder")
    log = (logs / f"job-{name}-{os.getpid()}.log").absolute()
    nodes, ranks = shape
    cluster = "local" if name == "srun" else name
    host, here = socket.gethostname(), str(Path.cwd())
    entry = Submission(cluster, str(os.getpid()), host, nodes, ranks, str(log), command=list(command), folder=here)
    submissions.append(out, entry)
    for note in notes:
        log_line(note, log)
    return log


def run(name: str, command: Sequence[str], env: Mapping[str, str], log: Path, signals: Mapping[int, int]) -> int:
    """Run the launcher ``name`` by ``command`` to its end; its exit code, 128 + n when signal n ended it.

    ``signals``: which signal to send it instead of another, each once; others are forwarded unchanged. A second Ctrl-C,
    and the death of this process, end it at once.
    """
    processes.adopt_orphans()
    sender = _Sender(signals)
    with preemption.handling(sender), killed_with_this_process(log) as marked, copied_to(log) as (out, err):
        with open(out or os.devnull, "wb") as stdout, open(err or os.devnull, "wb") as stderr:
            streams = {"stdout": stdout, "stderr": stderr} if out else {}
            process = subprocess.Popen(
                list(command),
                env={**env, **marked},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal reaches this process only
                **streams,  # type: ignore[call-overload]
            )
        sender.follow(process)
        code = process.wait()
        processes.kill_children()
    code = 128 - code if code < 0 else code
    return REQUEUE if code - 128 in sender.forwarded else code  # it came before they caught it: nothing was trained


def log_line(text: str, log: Path, level: str = "I") -> None:
    """Print ``text``, and append it to ``log``."""
    for line in text.splitlines():
        line = f"{time.strftime('%H:%M:%S')} {level} {line}"
        say(line, file=sys.stderr)
        files.append(log, line + "\n", 0o600)


@contextmanager
def copied_to(log: Path) -> Iterator[tuple[str, str]]:
    """Paths to which a child writes its output and errors during the block, to be shown and appended to ``log``.

    Both are empty if this process has a terminal, which the child then inherits.
    """
    if sys.stderr is not None and sys.stderr.isatty():
        yield "", ""
        return
    with os.fdopen(files.appending(log, 0o600), "ab", buffering=0) as file:
        pipes = [os.pipe() for _ in range(2)]
        threads = [
            threading.Thread(target=_copy, args=(source, shown, file), daemon=True)
            for (source, _), shown in zip(pipes, (sys.stdout, sys.stderr), strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            yield f"/proc/self/fd/{pipes[0][1]}", f"/proc/self/fd/{pipes[1][1]}"
        finally:
            for _, sink in pipes:
                os.close(sink)
            for thread in threads:
                thread.join(5.0)  # a left-over process may still hold the pipe


def _copy(source: int, shown: IO[str] | None, log: IO[bytes]) -> None:
    """Show and log what comes from the pipe ``source``; a closed terminal or a full disk does not end the run."""
    rest = b""
    while data := os.read(source, 1 << 16):
        lines, newline, rest = (rest + data).rpartition(b"\n")  # whole lines, so that the two streams do not mix
        with suppress(OSError, ValueError):
            log.write(lines + newline)
        if shown is not None:
            with suppress(OSError):
                shown.flush()
                os.write(shown.fileno(), data)
    with suppress(OSError, ValueError):
        log.write(rest)
    os.close(source)


class _Sender:
    """Sends signals to the launcher's process, each once."""

    def __init__(self, signals: Mapping[int, int]):
        self.process: subprocess.Popen[bytes] | None = None
        self.signals, self.received = signals, list[int]()
        self.forwarded = set[int]()
        """What it has sent as a warning."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again = number in self.received
        self.received.append(number)
        if self.process and not again:
            self._forward(number)
        elif self.process and number == signal.SIGINT:
            self.forwarded.clear()
            self.process.send_signal(signal.SIGTERM)

    def follow(self, process: "subprocess.Popen[bytes]") -> None:
        """Send to ``process``, also what was received before it was started."""
        self.process = process
        for number in dict.fromkeys(self.received):
            self._forward(number)

    def _forward(self, number: int) -> None:
        assert self.process is not None
        self.forwarded.add(warning := self.signals.get(number, number))
        self.process.send_signal(warning)


@contextmanager
def killed_with_this_process(log: Path) -> Iterator[dict[str, str]]:
    """A variable for the environment of what is started during the block: if this process is killed, all that has it ends,
    and ``log`` says so."""
    marked = {environment.LAUNCH_ID: secrets.token_hex(8)}
    words = [str(kill_with_launcher.__file__), *(f"{name}={value}" for name, value in marked.items())]
    output = files.appending(log, 0o600)
    try:
        guard = subprocess.Popen(
            [sys.executable, "-IS", *words],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
        )
    finally:
        os.close(output)
    with guard:
        try:
            yield marked
        finally:
            guard.kill()
