"""Processes that encode: results come in the order of the work, and nobody outlives the parent.

Each worker has a pipe of its own. In concurrent.futures all of them write into one, and a worker that is killed in the
middle of a result leaves the parent waiting for the rest of it for ever.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

from hpclm.errors import HpclmError

Work = TypeVar("Work")
Done = TypeVar("Done")
HELD = 3  # pieces of work that a worker has at a time: one in hand, and the next ones


def ordered(function: Callable[[Work], Done], work: Iterable[Work], workers: int) -> Generator[Done, None, None]:
    """``function`` of each piece of work, in order; at most a few pieces per worker are held at a time.

    One worker is this process. HpclmError when a worker is killed; what ``function`` raises is raised here.
    """
    if workers == 1:
        yield from map(function, work)
        return
    with ExitStack() as opened:
        pipes = [_worker(function, opened) for _ in range(workers)]
        given = taken = 0
        for piece in work:
            if given - taken == HELD * workers:
                yield _result(pipes[taken % workers])
                taken += 1
            with _heard():
                pipes[given % workers].send(piece)
            given += 1
            del piece
        while taken < given:
            yield _result(pipes[taken % workers])
            taken += 1


@contextmanager
def _heard() -> Iterator[None]:
    """A worker that does not answer was killed."""
    try:
        yield
    except (EOFError, OSError) as error:  # OSError: in the middle of an answer
        time.sleep(0.2)  # a signal to all of the job ends workers too; what it asks of this process comes first
        raise HpclmError(
            "a worker was killed, most likely for memory; try fewer --workers, no dataset was written"
        ) from error


def _worker(function: Callable[[Work], Done], opened: ExitStack) -> Connection:
    """A new worker's pipe; the worker ends when it is closed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    resource_tracker.ensure_running()  # starting it lets Ctrl-C through again
    process = context.Process(target=_serve, args=(theirs, function), daemon=True)
    with _deaf_children():
        process.start()
    theirs.close()
    opened.callback(process.join)
    opened.callback(ours.close)
    return ours


def _result(pipe: Connection) -> Any:
    with _heard():
        done, error = pipe.recv()
    if error is not None:
        raise error
    return done


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """Do what comes through the pipe, in order, until its other end is closed."""
    waiting: SimpleQueue[Any] = SimpleQueue()

    def receive() -> None:  # always, so that the parent never waits to send to a worker that waits to send to it
        try:
            while True:
                waiting.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)  # the parent has no more use for what is in hand, or is gone

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
def told_to_end() -> Iterator[None]:
    """TERM and HUP end the block as Ctrl-C does, so that it can tidy up; the exit code says which."""

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
def _deaf_children() -> Iterator[None]:
    """Processes started in the block leave Ctrl-C to the parent, from their first moment on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
