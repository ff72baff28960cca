"""A launch in the foreground: its record and log, and a launcher's command (mpirun, srun) run to its end."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from hpclm import files
from hpclm.config import RunConfig
from hpclm.errors import REQUEUE
from hpclm.launch import kill_with_launcher
from hpclm.node import environment, preemption, processes
from hpclm.rundir import submissions
from hpclm.rundir.submissions import Submission
from hpclm.terminal import say

STARTED = re.compile(r"Traceback|Exit code:|exited on signal")  # in what mpirun prints when a rank has failed
LOGGED = re.compile(rb"^\d\d:\d\d:\d\d [A-Z] ", re.MULTILINE)  # a line of a rank's log


def begin(
    config: RunConfig, name: str, shape: tuple[int, int], notes: Sequence[str] = (), command: Sequence[str] = ()
) -> Path:
    """Make the run directory, record the launch, and log its ``notes``; the path of its log.

    ``shape``: nodes, and the most ranks on one; ``command``: what the user typed.
    """
    out = files.private_folder(config.out, "run directory")
    logs = files.private_folder(out / "logs", "log folder")
    log = (logs / f"job-{name}-{os.getpid()}.log").absolute()
    nodes, each = shape
    cluster = "local" if name == "srun" else name
    host, here = socket.gethostname(), str(Path.cwd())
    entry = Submission(cluster, str(os.getpid()), host, nodes, each, str(log), command=list(command), folder=here)
    submissions.append(out, entry)
    for note in notes:
        log_line(note, log)
    return log


def run(name: str, command: Sequence[str], env: Mapping[str, str], log: Path, signals: Mapping[int, int]) -> int:
    """Run the launcher ``name`` by ``command`` to its end; its exit code, 128 + n when signal n ended it.

    Its output is shown, and appended to ``log``. ``signals``: which signal to send it instead of another, each once;
    others are forwarded unchanged. A second Ctrl-C, and the death of this process, end it at once.
    """
    processes.adopt_orphans()
    appending = os.fdopen(files.appending(log, 0o600), "ab", buffering=0)
    sender, marked = _Sender(signals), mark()
    with preemption.handling(sender), appending as file, killed_with_this_process(marked, log) as enrol:
        process = subprocess.Popen(
            list(command),
            env={**env, **marked},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal reaches this process only
            preexec_fn=enrol,
        )
        sender.follow(process)
        output = Output(file, hold=name == "mpirun")
        output.copy(process.stdout, sys.stdout)
        output.copy(process.stderr, sys.stderr)
        code = process.wait()
        processes.kill_children()
        cause = output.finish(code not in (0, *(-number for number in sender.forwarded)))
    if cause:
        how = "; it must reach every host without a password: ssh HOST true" * bool(re.search("[rs]sh", cause))
        log_line(f"{name} could not start the processes: {cause}{how}\nall it printed is in {log}", log, "E")
        return 1
    code = 128 - code if code < 0 else code
    return REQUEUE if code - 128 in sender.forwarded else code  # it came before they caught it: nothing was trained


def log_line(text: str, log: Path, level: str = "I") -> None:
    """Print ``text``, and append it to ``log``."""
    for line in text.splitlines():
        line = f"{time.strftime('%H:%M:%S')} {level} {line}"
        say(line, file=sys.stderr)
        files.append(log, line + "\n", 0o600)


class Output:
    """Shows and logs the output of a launcher and its ranks.

    ``hold``: show nothing until a rank has logged a line; if no rank starts, one sentence of the launcher is enough.
    """

    def __init__(self, log: IO[bytes], hold: bool = True):
        self._log, self._threads = log, list[threading.Thread]()
        self._held: list[tuple[Any, bytes]] | None = [] if hold else None
        self._lock = threading.Lock()

    def copy(self, source: IO[bytes] | None, shown: Any) -> None:
        """Show and log what ``source`` prints, in a thread; a closed terminal or a full disk does not end the run."""

        def act() -> None:
            assert source is not None
            rest = b""
            while data := os.read(source.fileno(), 1 << 16):
                # whole lines, so that the two streams do not mix
                whole, newline, rest = (rest + data).rpartition(b"\n")
                with suppress(OSError):
                    self._log.write(whole + newline)
                self._show(shown, data)
            with suppress(OSError):
                self._log.write(rest)

        self._threads.append(threading.Thread(target=act, daemon=True))
        self._threads[-1].start()

    def finish(self, failed: bool) -> str:
        """Wait for the rest of the output; returns why no rank started, if the launcher ``failed`` before one did."""
        for thread in self._threads:
            thread.join(5.0)  # a left-over process may still hold the pipe
        printed = b"".join(data for _, data in self._held or []).decode(errors="replace")
        if failed and printed and not STARTED.search(printed):
            return _sentence(printed)
        self._release()
        return ""

    def _show(self, shown: Any, data: bytes) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append((shown, data))
            else:
                _put(shown, data)
        if self._held is not None and LOGGED.search(data):
            self._release()

    def _release(self) -> None:
        with self._lock:
            for shown, data in self._held or []:
                _put(shown, data)
            self._held = None


def _put(shown: Any, data: bytes) -> None:
    with suppress(OSError, AttributeError):  # closed, or never open
        shown.flush()
        os.write(shown.fileno(), data)


def _sentence(printed: str) -> str:
    """The first sentence that a launcher printed."""
    worded = [line.strip() for line in printed.split("\n") if re.search(r"\w", line)]
    goes_on = len(worded) > 1 and ": " not in worded[0] and worded[1][0].islower()
    return " ".join(worded[: 1 + goes_on]).rstrip(":")


class _Sender:
    """Sends signals to the launcher's process, each once."""

    def __init__(self, signals: Mapping[int, int]):
        self.process: subprocess.Popen | None = None
        self.signals, self.sent = signals, set[int]()
        self.forwarded = set[int]()
        """What it has sent as a warning."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and number in self.sent
        if number in self.sent and not again:
            return
        self.sent.add(number)
        if again and self.process:
            self.forwarded.clear()
            self.process.send_signal(signal.SIGTERM)
        elif self.process:
            self._forward(number)

    def follow(self, process: subprocess.Popen) -> None:
        """Send to ``process``, also what was received before it was started."""
        self.process = process
        for number in sorted(self.sent):
            self._forward(number)

    def _forward(self, number: int) -> None:
        assert self.process is not None
        self.forwarded.add(warning := self.signals.get(number, number))
        self.process.send_signal(warning)


def mark() -> dict[str, str]:
    """A variable for the environment of all that a launch starts, by which it is found if this process is killed."""
    return {environment.LAUNCH_ID: secrets.token_hex(8)}


@contextmanager
def killed_with_this_process(marked: Mapping[str, str], log: Path) -> Iterator[Callable[[], object]]:
    """During the block, if this process is killed, everything whose environment has the variable ``marked`` ends.

    It gives a function for mpirun or srun to call before it executes its program: that one is asked to end first.
    ``log``: of the launch, where this is logged.
    """
    script = str(Path(kill_with_launcher.__file__))
    words = [f"{name}={value}" for name, value in marked.items()]
    output = files.appending(log, 0o600)
    try:
        options = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.DEVNULL}
        guard = subprocess.Popen([sys.executable, "-IS", script, *words], start_new_session=True, **options)  # type: ignore[call-overload]
    finally:
        os.close(output)
    with guard:
        pipe = guard.stdin.fileno()
        try:
            yield lambda: os.write(pipe, f"{os.getpid()}\n".encode())
        finally:
            guard.kill()
