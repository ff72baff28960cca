"""Ranks that are slower than the others, by the time each spends on its own part of a step.

Everyone takes a step in the same time, since all wait for the slowest; so each rank counts the seconds in which it does
not wait (watchdog.py), and rank 0 compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low

STEPS = 5  # a comparison is over that many steps at least; who is slow in two of them in a row is named
SECONDS = 1.0  # and over that long
NOTABLE = 0.2  # part of a step's time that a slow rank must cost


@dataclass(frozen=True)
class Tally:
    """What a rank has counted since it began."""

    steps: int = 0
    own: float = 0.0
    """Seconds of steps in which it did not wait for others."""
    all: float = 0.0
    """Seconds of steps."""

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(self.steps - other.steps, self.own - other.own, self.all - other.all)


@dataclass(frozen=True)
class Slow:
    """A slow rank."""

    times: float
    """How many times the others' median it takes."""
    seconds: float
    """Of its own for a step."""
    median: float


@dataclass
class Comparison:
    """Compares ranks again and again, each time over the steps since the last."""

    limit: float
    """How many times the median is slow."""
    stages: int = 1
    """Stages of the pipeline, which may have unlike work: each rank is compared with those of its own."""
    _since: Mapping[int, Tally] = field(default_factory=dict)
    _before: Mapping[int, Slow] = field(default_factory=dict)

    def __call__(self, tallies: Mapping[int, Tally]) -> dict[int, Slow] | None:
        """The slow ranks; None while there are too few steps to tell."""
        if not self._since:
            self._since = dict(tallies)
            return None
        spans = {rank: tally - self._since.get(rank, Tally()) for rank, tally in tallies.items()}
        if any(span.steps < STEPS or span.all < SECONDS for span in spans.values()):
            return None
        self._since = dict(tallies)
        found: dict[int, Slow] = {}
        each = max(1, len(spans) // self.stages)  # a stage's ranks follow each other
        for first in range(0, len(spans), each):
            ranks = [rank for rank in range(first, first + each) if rank in spans]
            found |= compare({rank: spans[rank] for rank in (ranks if len(ranks) > 1 else spans)}, ranks, self.limit)
        again = {rank: slow for rank, slow in found.items() if rank in self._before}
        self._before = found
        return again


def compare(spans: Mapping[int, Tally], ranks: list[int], limit: float) -> dict[int, Slow]:
    """Those of ``ranks`` that take ``limit`` times the median of ``spans`` or more."""
    seconds = {rank: span.own / span.steps for rank, span in spans.items()}
    middle = median_low(seconds.values())
    found = {}
    for rank in ranks:
        cost = (seconds[rank] - middle) / (spans[rank].all / spans[rank].steps)
        if seconds[rank] >= limit * middle and cost >= NOTABLE:
            found[rank] = Slow(seconds[rank] / max(middle, 1e-9), seconds[rank], middle)
    return found
