"""Encoding processes: results come in the order of the work, and no worker outlives its parent.

Work and results are stored in files; only the names of files go through the executor's pipes. A name is short enough to be written at
once, so a worker that is killed cannot leave half a message, for which the parent would wait.
"""

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Any, TypeVar

from hpclm.base.errors import HpclmError
from hpclm.base.files import reader
from hpclm.base.folders import temporary_folder
from hpclm.node import environment, python, threads

Work = TypeVar("Work")
Result = TypeVar("Result")
QUEUED = 3  # pieces of work for each worker at a time, including the current one
ALONE = 4.0
"""Seconds that this process works alone at first: about the start-up time of workers, so that little work ends before they would start."""


def ordered(function: Callable[[Work], Result], work: Iterable[Work], workers: int) -> Generator[Result, None, None]:
    """The results of ``function`` for each piece of work, in order, with a few pieces per worker in memory.

    At first ``function`` runs in this process. Work left after ``ALONE`` seconds goes to up to ``workers`` processes, but at most one per
    core; a single worker is not started. HpclmError if a worker is killed; exceptions of ``function`` are raised here.
    """
    workers = min(workers, threads.usable())
    began = time.monotonic()
    work = iter(work)
    while workers == 1 or time.monotonic() - began < ALONE:
        try:
            piece = next(work)
        except StopIteration:
            return
        yield function(piece)
    context = multiprocessing.get_context("spawn")
    with (
        temporary_folder() as folder,
        environment.preserved(),
        ProcessPoolExecutor(workers, context, initializer=_begin) as pool,
    ):
        os.environ[python.SAFE_PATH] = "1"  # for the workers
        pending: deque[Future[Path]] = deque()
        others = multiprocessing.active_children()
        complete = False
        try:
            for number, piece in enumerate(work):
                if len(pending) == QUEUED * workers:
                    yield _taken(pending.popleft().result())
                path = _stored(piece, folder / str(number))
                del piece
                with _ctrl_c_for_parent():  # this starts a worker if there are too few
                    pending.append(pool.submit(_run, function, path))
            while pending:
                yield _taken(pending.popleft().result())
            complete = True
        except BrokenProcessPool as error:
            time.sleep(0.2)  # a signal to the whole job kills workers too; let this process handle it first
            raise HpclmError(
                "a worker was killed, most likely for memory; try fewer --workers, no dataset was written"
            ) from error
        finally:
            for worker in multiprocessing.active_children():
                if not complete and worker not in others:
                    worker.kill()  # its work is no longer needed, and may take long
            pool.shutdown(cancel_futures=True)


@contextmanager
def _ctrl_c_for_parent() -> Iterator[None]:
    """Processes started in this block never receive a terminal's Ctrl-C, which is for their parent."""
    ensure_running()  # start multiprocessing's helper first, because that unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """In a worker: exit when the parent ends in any way, and silence warnings, which the parent has given for the same tokenizer."""
    logging.disable(logging.WARNING)
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run(function: Callable[[Any], Any], path: Path) -> Path:
    return _stored(function(_taken(path)), path)


def _stored(value: Any, path: Path) -> Path:
    with path.open("wb") as file:
        pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
    return path


def _taken(path: Path) -> Any:
    with reader(path) as file:
        value = pickle.load(file)
    path.unlink()
    return value
