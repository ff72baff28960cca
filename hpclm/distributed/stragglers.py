"""Slow ranks, by the time that each works in a step.

A step takes the same time on every rank, since all wait for the slowest. So each rank counts the seconds of its steps in
which it does not wait for others (WorkTimer) and sends them with its heartbeats. Rank 0 compares them and names the slow ranks
in the log and in ranks.json.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from hpclm import files
from hpclm.distributed.rendezvous import RankInfo

log = logging.getLogger(__name__)
STEPS = 5  # a comparison covers at least this many steps; a rank that is slow in two consecutive ones is named
SECONDS = 1.0  # and at least this long
SLOW = 1.5  # multiple of the others' median work per step
NOTABLE = 0.2  # fraction of a step's time that a slow rank must cost
Row = dict[str, Any]
"""A slow rank in ranks.json: rank, host, seconds of work per step, the others' median, and the ratio of both."""


@dataclass(frozen=True)
class Tally:
    """A rank's counters since its start."""

    steps: int = 0
    work: float = 0.0
    """Seconds in steps in which it did not wait for others."""
    total: float = 0.0
    """Seconds in steps."""

    def since(self, before: "Tally") -> "Tally":
        """What was counted after ``before``."""
        return Tally(self.steps - before.steps, self.work - before.work, self.total - before.total)


class WorkTimer:
    """Counts the steps of this rank and its work in them, with two readings of the clocks in a step.

    On a CPU, work is the time that the main thread is running or could run, and that it reads data. On a GPU, where work and
    waiting look alike from the host, only reading data counts, and the time that the main thread could run but does not.
    """

    def __init__(self) -> None:
        self.tally = Tally()
        self._began = self._ran = self._read = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began, self._ran, self._read = time.monotonic(), _ran(), 0.0

    def end(self) -> None:
        """The step ends."""
        total = time.monotonic() - self._began
        work = min(total, _ran() - self._ran + self._read)
        self.tally = Tally(self.tally.steps + 1, self.tally.work + work, self.tally.total + total)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """During the block this rank reads data, or waits for them."""
        began, ran = time.monotonic(), _ran()
        yield
        self._read += max(0.0, time.monotonic() - began - (_ran() - ran))  # what it ran is counted by ``end``


class Stragglers:
    """On rank 0: compares the ranks' counters, each time over the steps since the last comparison."""

    def __init__(self, ranks: Sequence[RankInfo], path: Path, stages: int = 1):
        """``path``: the file that lists slow ranks.
        ``stages``: of the pipeline; their work may differ, so each rank is compared with the others of its stage."""
        self.ranks, self.path, self.stages = ranks, path, stages
        self._since: Mapping[int, Tally] = {}
        self._suspects = self._slow = dict[int, Row]()
        with suppress(OSError):
            path.unlink(missing_ok=True)  # of the attempt before

    def update(self, tallies: Mapping[int, Tally], step: int) -> dict[int, Row]:
        """Compare the ranks once there are enough steps, and log which become slow; those that are slow now."""
        spans = {rank: tally.since(self._since.get(rank, Tally())) for rank, tally in tallies.items()}
        if any(span.steps < STEPS or span.total < SECONDS for span in spans.values()):
            return self._slow
        self._since, before, suspects = dict(tallies), self._slow, self._compare(spans)
        self._slow = {rank: row for rank, row in suspects.items() if rank in self._suspects}
        self._suspects = suspects
        for rank in sorted(self._slow.keys() - before.keys()):
            row, text = (
                self._slow[rank],
                "%s is slow: %.3g s of work per step, %.1f times the others' median of %.3g s (step %d)",
            )
            log.warning(text, self.ranks[rank], row["seconds"], row["times"], row["median"], step)
        for rank in sorted(before.keys() - self._slow.keys()):
            log.info("rank %d is no longer slow (step %d)", rank, step)
        if self._slow.keys() != before.keys():
            content = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "slow": [*self._slow.values()]}
            with suppress(OSError):
                files.write_text(self.path, json.dumps(content) + "\n")
        return self._slow

    def _compare(self, spans: Mapping[int, Tally]) -> dict[int, Row]:
        """The ranks that work ``SLOW`` times as long in a step as the median of their stage, or longer."""
        slow, share = dict[int, Row](), max(1, len(spans) // self.stages)
        work = {rank: span.work / span.steps for rank, span in sorted(spans.items())}
        for rank, seconds in work.items():
            first = rank - rank % share  # the ranks of a stage are consecutive
            peers = (
                [work[peer] for peer in range(first, min(first + share, len(work)))] if share > 1 else [*work.values()]
            )
            median, step = median_low(peers), spans[rank].total / spans[rank].steps
            if seconds >= SLOW * median and seconds - median >= NOTABLE * step:
                host, times = self.ranks[rank].host, seconds / max(median, 1e-9)
                slow[rank] = {"rank": rank, "host": host, "times": times, "seconds": seconds, "median": median}
        return slow


def _ran() -> float:
    """Seconds that the main thread was running or could run; on a GPU only the latter; 0 if unknown."""
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    with suppress(OSError, ValueError):
        text = Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat").read_text()
        running, ready, _ = map(int, text.split())
        return (ready + (0 if on_gpu else running)) / 1e9
    return 0.0
