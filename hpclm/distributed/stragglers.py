"""Straggler detection: ranks that are slower than the others, by the time each works in a step.

A step takes the same time on every rank, since all wait for the slowest. So each rank counts the seconds in which it
does not wait (WorkTimer). Rank 0 compares them (Stragglers), and names the slow ranks in the log and in ranks.json.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from hpclm import files
from hpclm.distributed import stacks
from hpclm.distributed.rendezvous import RankInfo

log = logging.getLogger(__name__)
STEPS = 5  # a comparison covers at least this many steps; a rank that is slow in two consecutive ones is named
SECONDS = 1.0  # and at least this long
NOTABLE = 0.2  # fraction of a step's time that a slow rank must cost
REFRESH = 60.0  # seconds after which the figures of slow ranks are written again


class WorkTimer:
    """Counts the seconds in which a rank works, by sampling its main thread."""

    def __init__(self) -> None:
        self.work = self.total = 0.0
        self._ran = 0.0

    def look(self, passed: float, interval: float, in_step: bool) -> None:
        """One sample, ``passed`` seconds after the last (``interval`` was intended); ``in_step``: whether it is part of
        a step.

        In the backward pass, which Python cannot see into, only the time counts in which the main thread was running or
        runnable, and by which this sample is late: the process was stopped, or the machine is busy. On a GPU, where
        work and waiting look alike from here, only reading data and such delays count.
        """
        before, self._ran = self._ran, _ran()
        if not in_step:
            return
        self.total += passed
        frame = stacks.main_frame()
        waiting = stacks.collective(frame)
        if not waiting and (stacks.reads_data(frame) or not _on_gpu()):
            self.work += passed
        else:
            ran = self._ran - before if waiting == "backward" else 0.0
            self.work += min(passed, ran + max(0.0, passed - 2 * interval))


@dataclass(frozen=True)
class Tally:
    """A rank's counters since its start."""

    steps: int = 0
    work: float = 0.0
    """Seconds in steps in which it did not wait for others."""
    total: float = 0.0
    """Seconds in steps."""

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(self.steps - other.steps, self.work - other.work, self.total - other.total)


@dataclass(frozen=True)
class Straggler:
    """A slow rank."""

    times: float
    """Its time, in multiples of the median."""
    seconds: float
    """Seconds of work per step, without waiting for others."""
    median: float


class Comparison:
    """Compares the ranks repeatedly, each time over the steps since the last comparison."""

    def __init__(self, limit: float, stages: int = 1):
        """``limit``: multiple of the median that counts as slow. ``stages``: of the pipeline; their work may differ, so
        each rank is compared with the others of its stage."""
        self.limit, self.stages = limit, stages
        self._since: Mapping[int, Tally] = {}
        self._before: Mapping[int, Straggler] = {}

    def __call__(self, tallies: Mapping[int, Tally]) -> dict[int, Straggler] | None:
        """The ranks that were slow twice in a row; None while there are too few steps to tell."""
        if not self._since:
            self._since = dict(tallies)
            return None
        spans = {rank: tally - self._since.get(rank, Tally()) for rank, tally in tallies.items()}
        if any(span.steps < STEPS or span.total < SECONDS for span in spans.values()):
            return None
        self._since = dict(tallies)
        found: dict[int, Straggler] = {}
        each = max(1, len(spans) // self.stages)  # the ranks of a stage are consecutive
        for first in range(0, len(spans), each):
            ranks = [rank for rank in range(first, first + each) if rank in spans]
            found |= compare({rank: spans[rank] for rank in (ranks if len(ranks) > 1 else spans)}, ranks, self.limit)
        again = {rank: slow for rank, slow in found.items() if rank in self._before}
        self._before = found
        return again


def compare(spans: Mapping[int, Tally], ranks: list[int], limit: float) -> dict[int, Straggler]:
    """Those of ``ranks`` that take ``limit`` times the median of ``spans`` or more."""
    seconds = {rank: span.work / span.steps for rank, span in spans.items()}
    middle = median_low(seconds.values())
    found = {}
    for rank in ranks:
        cost = (seconds[rank] - middle) / (spans[rank].total / spans[rank].steps)
        if seconds[rank] >= limit * middle and cost >= NOTABLE:
            found[rank] = Straggler(seconds[rank] / max(middle, 1e-9), seconds[rank], middle)
    return found


class Stragglers:
    """On rank 0: compares the ranks' counters, and logs which ranks become slow, and which no longer are."""

    def __init__(self, limit: float, ranks: Sequence[RankInfo]):
        self.limit, self.ranks = limit, ranks
        self._compare: Comparison | None = None
        self._path: Path | None = None
        self._known: dict[int, Straggler] = {}
        self._written = 0.0

    def begin(self, path: Path, stages: int) -> None:
        """Start to compare ranks of a pipeline of ``stages``, and to write slow ones to ``path``."""
        self._path = path
        with suppress(OSError):
            path.unlink(missing_ok=True)  # of the attempt before
        self._compare = Comparison(self.limit, stages) if self.limit else None

    def update(self, words: Mapping[int, Mapping[str, Any]], step: int) -> None:
        """Compare the ranks' last heartbeats."""
        if self._compare is None or len(words) < len(self.ranks):
            return
        found = self._compare({rank: Tally(w["steps"], w["work"], w["total"]) for rank, w in sorted(words.items())})
        if found is None:
            return
        for rank, slow in found.items():
            if rank not in self._known:
                text = "%s is slow: %.3g s of work per step, %.1f times the others' median of %.3g s (step %d)"
                log.warning(text, self.ranks[rank], slow.seconds, slow.times, slow.median, step)
        for rank in self._known.keys() - found.keys():
            log.info("rank %d is no longer slow (step %d)", rank, step)
        if found.keys() != self._known.keys() or (found and time.monotonic() - self._written > REFRESH):
            self._write(found, step)
        self._known = found

    def _write(self, found: Mapping[int, Straggler], step: int) -> None:
        rows = [{"rank": rank, "host": self.ranks[rank].host, **asdict(slow)} for rank, slow in sorted(found.items())]
        content = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "slow": rows}
        self._written = time.monotonic()
        if self._path:
            with suppress(OSError):
                files.write_text(self._path, json.dumps(content) + "\n")


def _on_gpu() -> bool:
    """Whether this process uses a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _ran() -> float:
    """Seconds that the main thread was running or runnable; 0 if unknown."""
    try:
        text = Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat").read_text()
        running, ready, _ = text.split()
    except (OSError, ValueError):
        return 0.0
    return (int(running) + int(ready)) / 1e9
