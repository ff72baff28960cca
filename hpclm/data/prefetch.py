"""Reads ahead: what the next steps need is made by threads while the current step is computed."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls ``make(key)`` ahead of time for the keys that will be asked for after this one.

    ``following`` gives the key after a key. What is made depends on its key alone, so neither the number of threads nor
    asking out of turn changes anything but the time it takes; threads=0 makes it when it is asked for.
    """

    def __init__(self, make: Callable[[int], T], following: Callable[[int], int], threads: int):
        self._make, self._following, self._threads = make, following, threads
        self._pool = ThreadPoolExecutor(threads, "prefetch") if threads else None
        self._coming: dict[int, Future[T]] = {}

    def __call__(self, key: int) -> T:
        """What ``make(key)`` gives, or raises."""
        if self._pool is None:
            return self._make(key)
        wanted = [key]
        for _ in range(self._threads + 1):
            wanted.append(self._following(wanted[-1]))
        for stale in set(self._coming) - set(wanted):
            self._coming.pop(stale).cancel()
        for ahead in wanted:
            if ahead not in self._coming:
                self._coming[ahead] = self._pool.submit(self._make, ahead)
        return self._coming.pop(key).result()

    def close(self) -> None:
        """Make nothing more; what a thread is making now is the last."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
