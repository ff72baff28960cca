"""A pool of encoding processes: results arrive in the order of the work, and no worker outlives the parent.

Each worker has its own pipe. In concurrent.futures they share one, so if a worker is killed while it writes a result, the
parent waits for the rest of it forever.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

from hpclm.errors import HpclmError
from hpclm.node import python

Work = TypeVar("Work")
Done = TypeVar("Done")
QUEUED = 3  # pieces of work that a worker has at a time, including the current one


def ordered(function: Callable[[Work], Done], work: Iterable[Work], workers: int) -> Generator[Done, None, None]:
    """The results of ``function`` for each piece of work, in order, with a few pieces per worker in memory.

    With ``workers`` 1 it runs in this process. HpclmError if a worker is killed; exceptions of ``function`` are raised here.
    """
    if workers == 1:
        yield from map(function, work)
        return
    with ExitStack() as opened:
        pipes = [_worker(function, opened) for _ in range(workers)]
        given = taken = 0
        for piece in work:
            if given - taken == QUEUED * workers:
                yield _result(pipes[taken % workers])
                taken += 1
            with _detecting_killed_worker():
                pipes[given % workers].send(piece)
            given += 1
            del piece
        while taken < given:
            yield _result(pipes[taken % workers])
            taken += 1


@contextmanager
def _detecting_killed_worker() -> Iterator[None]:
    """HpclmError if a worker does not answer, because it was killed."""
    try:
        yield
    except (EOFError, OSError) as error:  # OSError: while it answered
        time.sleep(0.2)  # a signal to the whole job kills workers too; let this process handle it first
        raise HpclmError(
            "a worker was killed, most likely for memory; try fewer --workers, no dataset was written"
        ) from error


def _worker(function: Callable[[Work], Done], opened: ExitStack) -> Connection:
    """Start a worker; it exits when the returned pipe is closed."""
    ours, theirs = Pipe()
    with theirs, _children_ignoring_ctrl_c():
        command = python.command(__name__, str(theirs.fileno()))
        process = subprocess.Popen(command, env=python.safe_env(), stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    opened.callback(process.wait)
    opened.callback(ours.close)
    with _detecting_killed_worker():
        ours.send(sys.path)  # a notebook's may be its own
        ours.send(function)
    return ours


def _result(pipe: Connection) -> Any:
    with _detecting_killed_worker():
        done, error = pipe.recv()
    if error is not None:
        raise error
    return done


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """Process what arrives through the pipe, in order, until its other end is closed."""
    waiting: SimpleQueue[Any] = SimpleQueue()

    def receive() -> None:  # in a thread, so that parent and worker never block on sending to each other
        try:
            while True:
                waiting.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)  # the parent is done, or dead

    threading.Thread(target=receive, daemon=True).start()
    while True:
        piece = waiting.get()
        answer: tuple[Any, Exception | None]
        try:
            answer = function(piece), None
        except Exception as error:
            answer = None, error
        del piece
        try:
            pipe.send(answer)
        except OSError:
            os._exit(1)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """TERM and HUP raise SystemExit in the block, so that it can clean up, with exit code 128 + signal."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    here = threading.current_thread() is threading.main_thread()
    signals = [each for each in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(each) == signal.SIG_DFL]
    for each in signals:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in signals:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def _children_ignoring_ctrl_c() -> Iterator[None]:
    """Block SIGINT in the children that are started in the block: a terminal's Ctrl-C is for their parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if __name__ == "__main__":
    pipe = Connection(int(sys.argv[1]))
    sys.path[:] = pipe.recv()
    _serve(pipe, pipe.recv())
