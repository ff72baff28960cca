"""A launch in the foreground: its record, its log, and a process that starts the ranks and ends with this one."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from hpclm import files, folders
from hpclm.config import RunConfig
from hpclm.errors import ExitCode, HpclmError, shell_code
from hpclm.node import import_errors, preemption, processes, threads
from hpclm.node.parent import signal_at_death_of_parent
from hpclm.rundir import submissions
from hpclm.rundir.submissions import Submission
from hpclm.terminal import say

FLUSH = 5.0  # seconds that the last output may take to be copied; a left-over process may still hold the pipe


def begin(
    config: RunConfig, name: str, shape: tuple[int, int], notes: Sequence[str] = (), command: Sequence[str] = ()
) -> Path:
    """Make the run directory, record the launch, and log its ``notes``; the path of its log.

    ``shape``: nodes, and the most ranks on one; ``command``: what the user typed.
    """
    out = folders.private_folder(config.out, "run directory")
    logs = folders.private_folder(out / "logs", "log folder")
    log = (logs / f"job-{name}-{os.getpid()}.log").absolute()
    nodes, ranks = shape
    cluster = "local" if name == "srun" else name
    host, here = socket.gethostname(), str(Path.cwd())
    entry = Submission(
        cluster, str(os.getpid()), host, nodes, ranks, str(log), None, list(command), here, machine=files.here()
    )
    submissions.append(out, entry)
    for note in notes:
        line = f"{time.strftime('%H:%M:%S')} I {note}"
        say(line, file=sys.stderr)
        files.append(log, line + "\n", 0o600)
    return log


def run(command: Sequence[str], env: Mapping[str, str], log: Path, signals: Mapping[int, int]) -> int:
    """Run mpirun or srun by ``command`` to its end; its exit code, 128 + n when signal n ended it.

    ``signals``: which signal to send it instead of another. A second Ctrl-C, and the death of this process, end it at once.
    """

    def start() -> int:
        started = list[int]()
        forward = Forward(lambda: started, signals, signal.SIGTERM)
        with preemption.handling(forward):
            process = subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),
            )
            started.append(process.pid)
            for number in list(forward.received):  # before it had started
                forward.send(number)
            try:
                code = process.wait()
            except KeyboardInterrupt:
                process.wait()
                return ExitCode.INTERRUPTED
        warnings = {signals.get(number, number) for number in forward.received}
        return (
            ExitCode.REQUEUE if -code in warnings or code - 128 in warnings else code
        )  # it came before they caught it

    return contained(start, log)


def contained(work: Callable[[], int], log: Path) -> int:
    """The exit code of ``work`` in a child process, which ends with everything it has started if this process is killed.

    It receives the signals of this process. What it prints is also in ``log``, unless this process has a terminal.
    """
    parent = os.getpid()
    with _copied_to(log) as streams:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            code: int = ExitCode.FAILED
            try:
                for number, handle in streams.items():
                    os.dup2(handle, number)
                threads.unbind()  # PyTorch may have been loaded
                os.setsid()  # Ctrl-C in a terminal reaches the parent only
                preemption.end_at_once()  # also by Ctrl-C, while PyTorch is imported
                processes.adopt_orphans()
                processes.when_orphaned(parent, lambda: _orphaned(log))
                code = work()
                processes.kill_children()
            except HpclmError as error:
                code = error.exit_code
                say(f"error: {error}", file=sys.stderr)
            except BaseException as error:
                if reason := import_errors.explained(error):
                    code = ExitCode.INVALID
                    say(f"error: {reason}", file=sys.stderr)
                else:
                    traceback.print_exc()
            finally:
                os._exit(shell_code(code))
        with preemption.handling(lambda number, _: processes.send_signal(child, number)):
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return shell_code(code)


def end_with(parent: int) -> None:
    """In a process that becomes mpirun, srun or a run: it ends its ranks, on all machines, when process ``parent`` is killed."""
    signal_at_death_of_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(shell_code(-signal.SIGKILL))


def _orphaned(log: Path) -> None:
    """End all ranks: by their launcher, which reaches those of other machines, then by force."""
    processes.terminate_children(2.5)
    processes.kill_children()
    text = f"{time.strftime('%H:%M:%S')} E the launcher was killed; what it had started has ended too\n"
    with suppress(OSError):
        files.append(log, text, 0o600)
    os._exit(shell_code(-signal.SIGKILL))


@contextmanager
def _copied_to(log: Path) -> Iterator[dict[int, int]]:
    """For the standard output and error, pipes to copy them to ``log``, too; none if this process has a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        yield {}
        return
    # a closed terminal or a full disk does not end tee, nor does Ctrl-C
    tee = ["tee", "--append", "--output-error=warn", str(log)]
    options = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    copies = {number: subprocess.Popen(tee, stdout=number, **options) for number in (1, 2)}  # type: ignore[call-overload]
    try:
        yield {number: copy.stdin.fileno() for number, copy in copies.items()}
    finally:
        for copy in copies.values():
            copy.stdin.close()
        for copy in copies.values():
            with suppress(subprocess.TimeoutExpired):
                copy.wait(FLUSH)


class Forward:
    """Forwards signals, each once, to the processes that ``targets`` names; a second Ctrl-C ends them."""

    def __init__(self, targets: Callable[[], Sequence[int]], signals: Mapping[int, int], last: int):
        """``signals``: which signal to send instead of another; ``last``: what a second Ctrl-C sends."""
        self.targets, self.signals, self.last = targets, signals, last
        self.received: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; KeyboardInterrupt at the second Ctrl-C."""
        if number not in self.received:
            self.received.append(number)
            self.send(number)
        elif number == signal.SIGINT:
            self.send(number, self.last)
            raise KeyboardInterrupt

    def send(self, number: int, instead: int = 0) -> None:
        """Send the signal ``number``, or what replaces it."""
        for pid in self.targets():
            processes.send_signal(pid, instead or self.signals.get(number, number))
