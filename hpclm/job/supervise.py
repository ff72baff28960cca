"""Start the processes of a run, pass signals on to each of them once, and end all when one fails."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpclm.errors import REQUEUE
from hpclm.job import death, remains
from hpclm.job.death import End
from hpclm.job.guardian import WARNINGS
from hpclm.job.streams import Streams

POLL = 0.5  # seconds between two questions whether one has failed elsewhere


@dataclass(frozen=True)
class Process:
    """A process to start."""

    name: str
    """As it is called in messages: rank 3."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    log: Path | None = None
    """Where it writes what it prints, once it has begun."""


@dataclass(frozen=True)
class Manner:
    """What differs between kinds of launches."""

    signals: Mapping[int, int] | None = None
    """Which signal is sent for which (those of WARNINGS); None: each as it is."""
    spoken: bool = True
    """Whether to tell of exit codes and of what was ended; False where somebody else does. Kills are always told."""
    failed: Callable[[], bool] | None = None
    """Asked twice a second whether processes elsewhere, which are not seen from here, have failed."""
    settle: float = 3.0
    """Seconds that the others have, once one has failed, to say what they know of it and to end."""
    grace: float = 2.0
    """Seconds between SIGTERM and SIGKILL for those that run on when one has failed."""
    ended: Callable[[End, bool], None] | None = None
    """Told of each process that ends, at once, and whether that was by itself or by a signal it was sent."""


class Crew:
    """The processes, those that run and how the others ended."""

    def __init__(self) -> None:
        self.running: dict[int, Process] = {}
        self.ends: list[End] = []
        """Of those that ended by themselves, in the order of their ends."""
        self.sent: set[int] = set()
        """Signals that they were sent."""
        self.noted = True
        self._popen: list[subprocess.Popen] = []

    def start(self, process: Process, outputs: tuple[int, int] | None) -> None:
        """Start a process that dies with this one, in a session of its own: what is sent to its group is its own."""
        out, err = outputs or (None, None)
        popen = subprocess.Popen(
            process.command,
            env=dict(process.env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=death.with_parent(os.getpid()),
        )
        self._popen.append(popen)
        self.running[popen.pid] = process

    def reap(self) -> list[End]:
        """Collect dead children, orphans among them; gives the ends of processes of the crew."""
        found = []
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if process := self.running.pop(pid, None):
                    code = os.waitstatus_to_exitcode(status)
                    found.append(End(process.name, pid, code, process.log))
        for popen in self._popen:
            if popen.pid not in self.running:
                popen.returncode = popen.returncode or 0  # it is reaped: nothing is left for Popen to do
        found.sort(key=lambda end: end.code >= 0)  # who was killed did not follow who gave up
        if self.noted:
            self.ends += found
        return found

    def send(self, number: int) -> None:
        """Send a signal to every process, the first time it is asked for."""
        if number not in self.sent:
            self.sent.add(number)
            for pid in self.running:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    @property
    def failed(self) -> list[End]:
        """Ends that were none of a run's good ones."""
        return [end for end in self.ends if end.code not in (0, REQUEUE)]


def supervise(
    processes: Sequence[Process], lifeline: int, streams: Streams | None, manner: Manner | None = None
) -> int:
    """Run ``processes`` to their end; the exit code is the first failing one's, 85 when one asks for it, or 0.

    Without ``streams`` they print where this process does. When ``lifeline`` ends, the launcher is gone, and all end.
    """
    manner = manner or Manner()
    say = streams.say if streams else _say
    crew, kills = Crew(), death.out_of_memory_kills()
    with _heard(lifeline) as hear:
        try:
            for number, process in enumerate(processes):
                outputs = None
                if streams:
                    outputs = streams.other(process.name) if number else streams.first()
                crew.start(process, outputs)
                for handle in set(outputs or ()):
                    os.close(handle)
            if streams:
                streams.begin()
            why = _watch(crew, hear, manner, say)
            told = [end for end in crew.failed if end.code < 0]
            for end in told[:1]:
                if manner.spoken or -end.code not in crew.sent:
                    say(death.words(end, crew.sent, kills), "E")
            if crew.running and not why:
                _settle(crew, hear, manner.settle)
            if manner.spoken:
                for text in death.summary([end for end in crew.failed if end not in told[:1]], crew.sent, kills):
                    say(text, "E")
            if why and manner.spoken:
                say(why, "E")
        finally:
            crew.noted = False
            running = set(crew.running)
            ended = remains.end(
                quiet=0.0 if running or crew.failed else 1.0, grace=manner.grace, reap=lambda: _tell(crew, manner)
            )
    if ended and manner.spoken and (crew.failed or why):
        ranks = f"{len(running)} process{'es' * (len(running) != 1)} that ran on"
        say(f"ended {ranks} and {len(ended - running)} of their children", "W")
    if streams:
        streams.finish()
    return 128 + signal.SIGINT if why == INTERRUPTED else exit_code(crew)


INTERRUPTED = "a second Ctrl-C: ending now, nothing more is saved"
ORPHANED = "the launcher was killed: ending all processes of the run"


def exit_code(crew: Crew) -> int:
    """What the run ended with."""
    if death.again(crew.ends):
        return REQUEUE
    for end in crew.failed:
        return end.code if end.code > 0 else 128 - end.code
    return 0


def _tell(crew: Crew, manner: Manner) -> None:
    for end in crew.reap():
        if manner.ended:
            manner.ended(end, crew.noted and -end.code not in crew.sent)


def _watch(crew: Crew, hear: Callable[[float | None], list[int]], manner: Manner, say: Callable[..., None]) -> str:
    """Wait until all have ended or one has failed; why to end them otherwise, or nothing."""
    interrupts = 0
    elsewhere = manner.failed or (lambda: False)
    while crew.running and not crew.failed and not elsewhere():
        for number in hear(POLL if manner.failed else None):
            if number == GONE:
                return ORPHANED
            if number in WARNINGS:
                interrupts += number == signal.SIGINT
                if interrupts > 1:
                    return INTERRUPTED
                sent = (manner.signals or {}).get(number, number)
                if sent != number and sent not in crew.sent:
                    say(f"{signal.Signals(number).name}: passed on to the ranks as {signal.Signals(sent).name}", "W")
                crew.send(sent)
        _tell(crew, manner)
    return ""


def _settle(crew: Crew, hear: Callable[[float | None], list[int]], seconds: float) -> None:
    """Wait for the others' last words; not after a further Ctrl-C, nor without a launcher."""
    until = time.monotonic() + seconds
    while crew.running and (left := until - time.monotonic()) > 0:
        if {GONE, int(signal.SIGINT)} & set(hear(left)):
            return
        crew.reap()


GONE = 0


@contextmanager
def _heard(lifeline: int) -> Iterator[Callable[[float | None], list[int]]]:
    """A function that waits some seconds (None: for ever) and gives the numbers of signals that came, GONE for the
    end of ``lifeline``."""
    mine, woken = socket.socketpair()
    for end in (mine, woken):
        end.setblocking(False)
    numbers = (*WARNINGS, signal.SIGCHLD)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    waker = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
    with selectors.DefaultSelector() as selector:
        selector.register(mine, selectors.EVENT_READ)
        selector.register(lifeline, selectors.EVENT_READ)

        def hear(seconds: float | None) -> list[int]:
            found: list[int] = []
            for key, _ in selector.select(seconds):
                found += list(mine.recv(4096)) if key.fileobj is mine else [GONE]
            return found

        try:
            yield hear
        finally:
            signal.set_wakeup_fd(waker)
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            mine.close()
            woken.close()


def _say(text: str, level: str) -> None:
    with suppress(OSError):  # the reader may be what was killed
        print(f"{time.strftime('%H:%M:%S')} {level} {text}", file=sys.stderr, flush=True)
