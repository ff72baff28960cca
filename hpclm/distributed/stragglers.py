"""Detection of slow ranks, by the time that each works in a step.

A step takes the same time on every rank, since all wait for the slowest. So each rank measures the seconds in which it does not wait for
others (WorkTimer), and rank 0 compares them.
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
MIN_STEPS = 10  # steps until a rank's usual work is known
RECENT_STEPS = 20  # maximum number of steps in the median of the usual work
SLOW = 1.5  # multiple of the others' median work per step
NOTABLE = 0.2  # fraction of a step's time that a slow rank must cost


class WorkTimer:
    """Measures the steps of this rank and its work in them.

    On a CPU, work is the time in which the main thread runs, could run, or reads data. On a GPU the host cannot tell work from
    waiting. So work counts only while the main thread reads data, or could run but does not.
    """

    def __init__(self) -> None:
        self.on_gpu = False
        self.steps = 0
        self.work = 0.0  # median seconds of work in recent steps; 0 until MIN_STEPS are known
        self.seconds = 0.0  # median seconds of these steps
        self._recent = deque[tuple[float, float]](maxlen=RECENT_STEPS)  # work and seconds of each
        self._began = 0.0
        self._ran = 0.0
        self._read = 0.0

    def begin(self) -> None:
        """Start the clocks, as a step begins."""
        self._began = time.monotonic()
        self._ran = self._running()
        self._read = 0.0

    def end(self) -> None:
        """Count the step, as it ends."""
        seconds = time.monotonic() - self._began
        work = self._running() - self._ran + self._read
        self._recent.append((min(seconds, work), seconds))
        self.steps += 1
        if len(self._recent) >= MIN_STEPS:
            self.work, self.seconds = map(median_low, zip(*self._recent, strict=True))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the block as reading data, or waiting for them."""
        began = time.monotonic()
        ran = self._running()
        yield
        seconds = time.monotonic() - began
        self._read += max(0.0, seconds - (self._running() - ran))  # ``end`` counts the running time

    def _running(self) -> float:
        """Seconds that the main thread was running or could run, according to the kernel; on a GPU, only seconds that it could run. 0 if unknown."""
        with suppress(OSError, ValueError):
            text = Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat").read_text()
            running, ready, _ = map(int, text.split())
            return (ready if self.on_gpu else ready + running) / 1e9
        return 0.0


class Stragglers:
    """On rank 0: compares the work of the ranks, and names slow ranks in the log and in the run's record."""

    def __init__(self, ranks: Sequence[RankInfo], record: Callable[..., object], stages: int = 1):
        """``record``: adds an event to the run's record. ``stages``: pipeline stages; a rank is compared within its stage only."""
        self.ranks = ranks
        self.record = record
        # ranks of a stage, which are consecutive
        self.share = len(ranks) // stages if stages < len(ranks) else len(ranks)
        self._named = set[int]()
        self._slow = set[int]()

    def update(self, rows: Sequence[Sequence[float]], step: int) -> None:
        """Log ranks that are slow for the first time, and record every change. ``rows``: each rank's work and seconds of a step."""
        slow = {}
        for rank, (work, seconds) in enumerate(rows):
            # not the mean, which one slow rank would move
            median = median_low([row[0] for row in rows[rank - rank % self.share :][: self.share]])
            if work >= SLOW * median and work - median >= NOTABLE * seconds:
                times = work / max(median, 1e-9)
                host = self.ranks[rank].host
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
