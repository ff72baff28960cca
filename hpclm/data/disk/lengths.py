"""Exact document lengths of a dataset, and their histogram as text; in constant memory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpclm.data.disk.indexed import IndexedDataset

BLOCK = 1 << 18  # documents that are read at a time
PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
WIDE = 50  # longest / median from which the bins are logarithmic


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
        total = int(reached[-1])
        ranks = {name: math.ceil(part * total) for name, part in PERCENTILES.items()}
        found = {name: int(self.values[np.searchsorted(reached, rank)]) for name, rank in ranks.items()}
        mean = float(self.values @ self.counts) / total
        empty = int(self.counts[self.values == 0].sum())
        return {"min": int(self.values[0]), "mean": mean} | found | {"max": int(self.values[-1]), "empty": empty}


@dataclass(frozen=True)
class Bin:
    """``count`` documents have ``low`` to ``high`` tokens, inclusive."""

    low: int
    high: int
    count: int


def document_lengths(dataset: IndexedDataset) -> Lengths:
    """The lengths of documents; the index must have been checked."""
    return _gathered(_of_documents(dataset))


def sequence_lengths(dataset: IndexedDataset) -> Lengths:
    """The lengths of sequences."""
    return _gathered(_of_sequences(dataset))


def bins(lengths: Lengths, wanted: int = 16) -> list[Bin]:
    """About ``wanted`` bins at most, of equal width, or logarithmic for a wide range."""
    if not len(lengths.values):
        return []
    low, high = int(lengths.values[0]), int(lengths.values[-1])
    if high > WIDE * max(1, lengths.summary()["median"]) or high > 1000 * max(1, low):
        factor = (high + 1) ** (1 / wanted)
        edges = sorted({low, high + 1, *(e for k in range(wanted) if low < (e := round(factor**k)) <= high)})
    else:
        width = _round_number((high + 1 - low) / wanted)
        edges = [low, *range((low // width + 1) * width, high + 1, width), high + 1]
    counts = np.add.reduceat(np.append(lengths.counts, 0), np.searchsorted(lengths.values, edges[:-1]))
    places = np.searchsorted(lengths.values, edges)
    filled = np.where(np.diff(places) > 0, counts, 0)  # reduceat returns the first element for an empty range
    return [Bin(a, b - 1, int(n)) for a, b, n in zip(edges, edges[1:], filled, strict=False)]


def bars(found: list[Bin], width: int) -> str:
    """The bins as a bar chart of ``width`` characters."""
    names = [name(bin) for bin in found]
    margin = max(map(len, names), default=0)
    room = max(8, width - margin - 2 - max((len(f" {bin.count:,}") for bin in found), default=0))
    most = max((bin.count for bin in found), default=0)
    lines = []
    for words, bin in zip(names, found, strict=True):
        eighths = math.ceil(8 * room * bin.count / most) if most else 0
        bar = "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
        lines.append(f"{words:>{margin}}  {bar} {bin.count:,}")
    return "\n".join(lines)


def name(bin: Bin) -> str:
    """The lengths of a bin."""
    return f"{bin.low:,}" if bin.low == bin.high else f"{bin.low:,}–{bin.high:,}"


def _round_number(value: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... that is at least ``value``."""
    power = 10 ** max(0, math.ceil(math.log10(max(value, 1))) - 1)
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= value)


def _of_documents(dataset: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    for start in range(0, dataset.document_count, BLOCK):
        bounds = dataset.bounds(start, min(start + BLOCK, dataset.document_count))
        yield np.diff(dataset.places(bounds))
        dataset.release()


def _of_sequences(dataset: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(dataset), BLOCK):
        yield dataset.sizes[start : start + BLOCK].astype(np.int64)
        dataset.release()


def _gathered(blocks: Iterator[NDArray[np.int64]]) -> Lengths:
    values, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for block in blocks:
        new, often = np.unique(block, return_counts=True)
        both, inverse = np.unique(np.concatenate((values, new)), return_inverse=True)
        sums = np.zeros(len(both), np.int64)
        np.add.at(sums, inverse, np.concatenate((counts, often)))
        values, counts = both, sums
    return Lengths(values, counts)
