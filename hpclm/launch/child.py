"""Run the launcher of the ranks (srun, mpirun) as a child process, and forward signals to it."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from hpclm.base.errors import ConfigError, ExitCode, shell_code
from hpclm.base.terminal import say
from hpclm.node import preemption, processes

SIGNALS: dict[int, int] = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), signal.SIGUSR1)
"""srun and mpirun forward USR1 to the ranks (srun and Open MPI also USR2). At other signals, they end the ranks within a second."""


class Forward:
    """Forwards signals, each once, to the processes that ``targets`` names; a second Ctrl-C ends them."""

    def __init__(self, targets: Callable[[], Sequence[int]], signals: Mapping[int, int], last: int):
        """``signals``: signal -> the signal to send in its place. ``last``: the signal to send after a second Ctrl-C."""
        self.targets = targets
        self.signals = signals
        self.last = last
        self.received: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Forward the signal ``number``; KeyboardInterrupt at the second Ctrl-C."""
        if number not in self.received:
            self.received.append(number)
            self.send(number)
        elif number == signal.SIGINT:
            self.send(number, self.last)
            raise KeyboardInterrupt

    def send(self, number: int, instead: int = 0) -> None:
        """Send the signal ``instead``; without one, the signal ``number`` or its replacement in ``signals``."""
        for pid in self.targets():
            processes.send_signal(pid, instead or self.signals.get(number, number))


class Launcher:
    """Runs srun or mpirun, and forwards to it the signals that this process receives."""

    def __init__(self, signals: Mapping[int, int] = SIGNALS):
        """``signals``: signal -> the signal to send in its place."""
        self._pids: list[int] = []
        self.forward = Forward(lambda: self._pids, signals, signal.SIGTERM)

    def run(self, command: Sequence[str], env: Mapping[str, str], **options: object) -> int:
        """Run ``command`` to its end. ``options``: further arguments of ``subprocess.Popen``.

        Returns its exit code, 128 + n if signal n ended it, or 85 if that signal was forwarded before the ranks could catch it.
        """
        if not shutil.which(command[0], path=env.get("PATH")):
            raise ConfigError(f"{command[0]} is not on the PATH ({env.get('PATH', '')}), so no rank can be started")
        process = subprocess.Popen(list(command), env=dict(env), stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
        self._pids.append(process.pid)
        for number in list(self.forward.received):  # they came before it had started
            self.forward.send(number)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()
            return ExitCode.INTERRUPTED
        finally:
            self._pids.remove(process.pid)
        forwarded = {self.forward.signals.get(number, number) for number in self.forward.received}
        if -code in forwarded or code - 128 in forwarded:
            return ExitCode.REQUEUE
        if code < 0:
            say(f"{command[0]} was {processes.killed_by(-code)}", file=sys.stderr, flush=True)
        return shell_code(code)


def run(command: Sequence[str], env: Mapping[str, str], signals: Mapping[int, int], **options: object) -> int:
    """``Launcher.run``, while this process handles the signals that announce its end."""
    launcher = Launcher(signals)
    with preemption.handling(launcher.forward):
        return launcher.run(command, env, **options)
