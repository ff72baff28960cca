"""Processes that encode: results come in the order of the work, and nobody outlives the parent."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from hpclm.errors import HpclmError

Work = TypeVar("Work")
Done = TypeVar("Done")


def ordered(function: Callable[[Work], Done], work: Iterable[Work], workers: int) -> Generator[Done, None, None]:
    """``function`` of each piece of work, in order; at most a few pieces per worker are held at a time.

    One worker is this process. HpclmError when a worker is killed.
    """
    if workers == 1:
        yield from map(function, work)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start)
    try:
        running: deque[Future[Done]] = deque()
        for piece in work:
            with _deaf_children():
                running.append(pool.submit(function, piece))
            del piece
            if len(running) > 2 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BrokenProcessPool as error:
        time.sleep(0.2)  # a signal to all of the job ends workers too; what it asks of this process comes first
        raise HpclmError(
            "a worker was killed, most likely for memory; try fewer --workers, no dataset was written"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


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


def _start() -> None:
    """Do not outlive the parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
