"""A thread that writes for the training loop, which waits for no disk and no terminal."""

import queue
import threading
from collections.abc import Callable
from types import TracebackType

MAX_WAITING = 1000  # pieces of work that may wait; then the loop waits too
IDLE = 1.0  # seconds without work after which the thread does what it does when it is idle


class WriterThread:
    """Does pieces of work one after the other, in a separate thread; use it as a context manager.

    What one of them raises is raised at the next call in the thread that gave it, and nothing is done any more.
    """

    def __init__(self, idle: Callable[[], None] = lambda: None) -> None:
        """``idle``: called when there was no work for a while; must not raise."""
        self._idle = idle
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def __enter__(self) -> "WriterThread":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._work.put(None)
        self._thread.join()
        if error is None:
            self._check()

    def __call__(self, work: Callable[[], None]) -> None:
        """Have ``work`` done after all that was given before."""
        self._check()
        self._work.put(work)

    def flush(self) -> None:
        """Return once everything is done."""
        self._work.join()
        self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _next(self) -> Callable[[], None] | None:
        while True:
            try:
                return self._work.get(timeout=IDLE)
            except queue.Empty:
                self._idle()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                if self._failed is None:
                    work()
            except Exception as error:
                self._failed = error
            finally:
                self._work.task_done()
