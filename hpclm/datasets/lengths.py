"""Exact document lengths of a dataset, and their histogram as text; in constant memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpclm.data.indexed import IndexedDataset

BLOCK = 1 << 18  # documents that are read at a time
PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, eq=False)
class Lengths:
    """values [k], ascending: lengths in tokens; counts [k]: how often each occurs."""

    values: NDArray[np.int64]
    counts: NDArray[np.int64]

    def summary(self) -> dict[str, float]:
        """Minimum, mean, median, 90th and 99th percentile, maximum and number of empty ones; {} without documents."""
        if not len(self.values):
            return {}
        reached = np.cumsum(self.counts)
        ranks = np.ceil(np.array([*PERCENTILES.values()]) * reached[-1])
        percentiles = self.values[np.searchsorted(reached, ranks)].tolist()
        return {
            "min": int(self.values[0]),
            "mean": float(self.values @ self.counts) / int(reached[-1]),
            **dict(zip(PERCENTILES, percentiles, strict=True)),
            "max": int(self.values[-1]),
            "empty": int(self.counts[self.values == 0].sum()),
        }


@dataclass(frozen=True)
class Bin:
    """``count`` documents have ``low`` to ``high`` tokens, inclusive."""

    low: int
    high: int
    count: int

    @property
    def name(self) -> str:
        """Its lengths."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}–{self.high:,}"


def document_lengths(dataset: IndexedDataset) -> Lengths:
    """The lengths of documents; the index must have been checked."""
    return _counted(
        (np.diff(dataset.places(dataset.bounds(start, min(start + BLOCK, dataset.document_count)))))
        for start in _starts(dataset, dataset.document_count)
    )


def sequence_lengths(dataset: IndexedDataset) -> Lengths:
    """The lengths of sequences."""
    return _counted(dataset.sizes[start : start + BLOCK].astype(np.int64) for start in _starts(dataset, len(dataset)))


def _starts(dataset: IndexedDataset, count: int) -> Iterator[int]:
    for start in range(0, count, BLOCK):
        yield start
        dataset.release()


def _counted(blocks: Iterator[NDArray[np.int64]]) -> Lengths:
    values, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for block in blocks:
        new, often = np.unique(block, return_counts=True)
        values, inverse = np.unique(np.concatenate((values, new)), return_inverse=True)
        counts = np.bincount(inverse, np.concatenate((counts, often))).astype(np.int64)
    return Lengths(values, counts)


def bins(lengths: Lengths) -> list[Bin]:
    """From 0, 1, 2 to 3, 4 to 7, and so on, without the empty bins at both ends."""
    exponents = np.frexp(lengths.values)[1]  # of the smallest power of two above each length
    counts = np.bincount(exponents, lengths.counts).astype(np.int64)
    lowest = int(exponents[0]) if len(exponents) else 0
    return [Bin(1 << e >> 1, (1 << e) - 1, int(counts[e])) for e in range(lowest, len(counts))]
