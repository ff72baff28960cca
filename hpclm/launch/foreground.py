"""A launch in the foreground: its record, its log, and a child process that starts the ranks and ends with this one."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpclm.base import files, folders, paths
from hpclm.base.errors import ExitCode, HpclmError, shell_code
from hpclm.base.terminal import say
from hpclm.config import RunConfig
from hpclm.launch import child, send
from hpclm.launch.outcome import Outcome
from hpclm.node import import_errors, parent, preemption, processes, python
from hpclm.rundir import events

LAUNCHERS = {"local": "torchrun", "mpirun": "mpirun", "srun": "srun"}
FLUSH = 5.0  # seconds for the last output to be copied; a left-over process may still hold the pipe


@dataclass(frozen=True)
class Launch:
    """A request to launch a run in the foreground."""

    config: RunConfig
    command: Sequence[str] = ()
    """The words that the user typed, for the record."""
    resume_step: int | None = None
    """The step of the checkpoint to go back to; None to continue from the newest."""
    instead: Sequence[str] = ()
    """A program that runs in place of training, for tests."""

    def program(self) -> Sequence[str]:
        """The command that every rank runs."""
        path = Path(self.config.out) / "config.yaml"
        return self.instead or python.command("hpclm.train", paths.literal(path.absolute()))


@dataclass(frozen=True)
class Foreground:
    """A launch in the foreground that has begun."""

    log: Path
    outcome: Outcome

    def run(self, command: Sequence[str], env: Mapping[str, str], signals: Mapping[int, int]) -> int:
        """Run mpirun or srun (``command``) to its end; returns the exit code.

        ``signals``: signal -> the signal to send in its place. A second Ctrl-C, or the death of this process, ends it at once.
        """

        def start() -> int:
            # mpirun or srun also ends when this child process is killed
            ends_with_this = partial(parent.end_with, os.getpid(), signal.SIGTERM)
            whole = {**env, **self.outcome.variables}
            return child.run(command, whole, signals, start_new_session=True, preexec_fn=ends_with_this)

        return self.contained(start)

    def contained(self, work: Callable[[], int]) -> int:
        """Run ``work`` in a child process, again for each phase of the data that needs another start of the ranks; returns the exit code.

        If this process is killed, the child ends all its descendants. The child receives the signals of this process. Its output is
        also logged, unless this process has a terminal.
        """
        received = list[int]()
        code = self._in_process(work, received)
        while self.outcome.next_phase(code, received):
            code = self._in_process(work, received)
        return code

    def _in_process(self, work: Callable[[], int], received: list[int]) -> int:
        """``contained`` for one start. ``received``: notes the signals of this process."""

        def forward(number: int, _: object) -> None:
            received.append(number)
            processes.send_signal(forked, number)

        with _copied_to(self.log) as streams:
            sys.stdout.flush()
            sys.stderr.flush()
            this = os.getpid()
            forked = os.fork()
            if not forked:
                for number, handle in streams.items():
                    os.dup2(handle, number)
                os._exit(shell_code(self._in_child(this, work)))
            with preemption.handling(forward):
                code = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
        if code < 0:
            cause = f"the process that started the ranks was {processes.killed_by(-code)}"
            say(cause, file=sys.stderr)
            return self._ended(shell_code(code), cause)
        return code

    def _in_child(self, launcher: int, work: Callable[[], int]) -> int:
        """Call ``work`` in the child of process ``launcher``, and report the cause of its exit code."""
        try:
            os.setsid()  # Ctrl-C in a terminal reaches the parent only
            preemption.end_at_once()  # Ctrl-C works while PyTorch is imported
            processes.adopt_orphans()
            processes.when_orphaned(launcher, self._orphaned)
            code = work()
            processes.kill_children()
            code, why = self.outcome.settle(code)
            if self.outcome.next_phase(code):
                return code
            self.outcome.tell(code, why)
            return self._ended(code, why)
        except HpclmError as error:
            say(f"error: {error}", file=sys.stderr)
            return self._ended(error.exit_code, str(error))
        except BaseException as error:
            reason = import_errors.explained(error)
            if reason:
                say(f"error: {reason}", file=sys.stderr)
                return self._ended(ExitCode.INVALID, reason)
            traceback.print_exc()
            return self._ended(ExitCode.FAILED, repr(error))

    def _ended(self, code: int, cause: str) -> int:
        """Record the end of the launch if ``code`` is not 0; returns ``code``."""
        if code:
            with suppress(OSError):
                events.append(self.outcome.out, "ended", code=shell_code(code), cause=cause)
        return code

    def _orphaned(self) -> None:
        """End all ranks: first through their launcher, which reaches other machines, then with KILL."""
        processes.terminate_children(2.5)
        processes.kill_children()
        cause = "the launcher was killed; its processes were ended too"
        with suppress(OSError):
            files.append(self.log, f"{time.strftime('%H:%M:%S')} E {cause}\n", 0o600)
        os._exit(self._ended(shell_code(-signal.SIGKILL), cause))


def begin(launch: Launch, name: str, shape: tuple[int, int], notes: Sequence[str] = ()) -> Foreground:
    """Make the run directory, write its settings, record the launch, and log its ``notes``.

    ``shape``: nodes, and the most ranks on a node. LockedError if another launch or a run is using the run directory.
    """
    out = folders.private_folder(launch.config.out, "run directory")
    logs = folders.private_folder(out / "logs", "log folder")
    log = (logs / f"job-{name}-{os.getpid()}.log").absolute()
    host = socket.gethostname()
    with send.claimed(launch.config, launch.resume_step):
        events.append(
            out,
            "submitted",
            cluster="local" if name == "srun" else name,
            job_id=str(os.getpid()),
            log=str(log),
            command=[*launch.command],
            nodes=shape[0],
            tasks_per_node=shape[1],
            host=host,
            machine=files.here(),
            folder=str(Path.cwd()),
        )
    for note in notes:
        line = f"{time.strftime('%H:%M:%S')} I {note}"
        say(line, file=sys.stderr)
        files.append(log, line + "\n", 0o600)
    return Foreground(log, Outcome(out, f"{host}-{os.getpid()}", LAUNCHERS[name]))


@contextmanager
def _copied_to(log: Path) -> Iterator[dict[int, int]]:
    """Pipes that print, and also copy to ``log``, by the number of the stream (1, 2); empty if this process has a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        yield {}
        return
    # with these options, neither a closed terminal nor a full disk nor Ctrl-C ends tee
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
