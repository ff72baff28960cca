"""Slow ranks, by the time that each works in a step.

A step takes the same time on every rank, since all wait for the slowest. So each rank measures the seconds of its steps in
which it does not wait for others (WorkTimer), and rank 0 compares them.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median_low

from hpclm.distributed.ranks import RankInfo

log = logging.getLogger(__name__)
EVERY = 10  # steps between two comparisons
MIN_STEPS, RECENT_STEPS = 10, 20  # steps of which a rank's usual work is the median
SLOW = 1.5  # multiple of the others' median work per step
NOTABLE = 0.2  # fraction of a step's time that a slow rank must cost


class WorkTimer:
    """Measures the steps of this rank and its work in them, with two readings of the clocks in a step.

    On a CPU, work is the time that the main thread is running or could run, and that it reads data. On a GPU, where work and
    waiting look alike from the host, only reading data counts, and the time that the main thread could run but does not.
    """

    def __init__(self) -> None:
        self.on_gpu, self.steps = False, 0
        self.work = self.seconds = 0.0
        """The medians of recent steps; 0 while there are too few."""
        self._recent = deque[tuple[float, float]](maxlen=RECENT_STEPS)
        self._began = self._ran = self._read = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began, self._ran, self._read = time.monotonic(), self._running(), 0.0

    def end(self) -> None:
        """The step ends."""
        seconds = time.monotonic() - self._began
        self._recent.append((min(seconds, self._running() - self._ran + self._read), seconds))
        self.steps += 1
        if len(self._recent) >= MIN_STEPS:
            self.work, self.seconds = map(median_low, zip(*self._recent, strict=True))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """During the block this rank reads data, or waits for them."""
        began, ran = time.monotonic(), self._running()
        yield
        self._read += max(0.0, time.monotonic() - began - (self._running() - ran))  # what it ran is counted by ``end``

    def _running(self) -> float:
        """Seconds that the main thread was running or could run; on a GPU only the latter; 0 if unknown."""
        with suppress(OSError, ValueError):
            # the kernel counts, so that a step pays for two small reads and for no profiler
            text = Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat").read_text()
            running, ready, _ = map(int, text.split())
            return (ready if self.on_gpu else ready + running) / 1e9
        return 0.0


class Stragglers:
    """On rank 0: compares the ranks' work, and names the slow ones in the log and in the run's record."""

    def __init__(self, ranks: Sequence[RankInfo], record: Callable[..., object], stages: int = 1):
        """``record``: adds an event to the run's record.
        ``stages``: of the pipeline; their work may differ, so each rank is compared with the others of its stage."""
        self.ranks, self.record = ranks, record
        self.share = len(ranks) // stages if stages < len(ranks) else len(ranks)  # the ranks of a stage are consecutive
        self._named = set[int]()
        self._slow = set[int]()

    def update(self, rows: Sequence[Sequence[float]], step: int) -> None:
        """Log the ranks that are slow for the first time, and list those that are. ``rows``: of each rank its work and its
        seconds of a step."""
        slow = {}
        for rank, (work, seconds) in enumerate(rows):
            # the median, which one slow rank does not move as it would the mean
            median = median_low([row[0] for row in rows[rank - rank % self.share :][: self.share]])
            if work >= SLOW * median and work - median >= NOTABLE * seconds:
                times, host = work / max(median, 1e-9), self.ranks[rank].host
                slow[rank] = {"rank": rank, "host": host, "times": times, "seconds": work, "median": median}
        for rank in sorted(slow.keys() - self._named):
            text = "%s is slow: %.3g s of work per step, %.1f times the others' median of %.3g s (step %d)"
            row = slow[rank]
            log.warning(text, self.ranks[rank], row["seconds"], row["times"], row["median"], step)
        if slow.keys() != self._slow:
            with suppress(OSError):
                self.record("slow", step=step, ranks=[*slow.values()])
        self._named |= slow.keys()
        self._slow = set(slow)
