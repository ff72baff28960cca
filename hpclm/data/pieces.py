"""The tokens that samples consist of, and the samples that read given tokens."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpclm.data.indexed import IndexedDataset

SCANNED = 1 << 17  # numbers compared at a time, to stay in the processor's cache


class Piece(NamedTuple):
    """Consecutive tokens of a dataset in a sample."""

    at: int
    """Position of the first one in the sample's row."""
    dataset: int
    """Index in ``Traceable.datasets``."""
    begin: int
    """Position of the first one in the dataset's ``flat``."""
    size: int


@runtime_checkable
class Traceable(Protocol):
    """Samples whose tokens can be traced to datasets."""

    datasets: Sequence[IndexedDataset]

    def __len__(self) -> int:
        """See Samples."""
        ...

    def pieces(self, index: int) -> Iterator[Piece]:
        """The pieces of sample ``index``, in order, as they fill its row; without padding, and without tokens of no dataset."""
        ...

    def find(self, dataset: int, begin: int, end: int) -> NDArray[np.int64]:
        """The samples that read any of the tokens ``begin`` to ``end`` of a dataset, as input or label; ascending, each once."""
        ...


def sample_hash(row: NDArray[np.int64]) -> int:
    """64-bit xxh3 of a sample: its context + 1 tokens with PADDING, 8 bytes each, little-endian, whatever the dataset's type."""
    return xxhash.xxh3_64_intdigest(row.astype("<i8", copy=False).data)


def between(values: NDArray[np.integer], low: int, high: int) -> NDArray[np.int64]:
    """The positions of ``values`` that are at least ``low`` and less than ``high``."""
    found = [np.empty(0, np.int64)]
    for first in range(0, len(values), SCANNED):
        block = values[first : first + SCANNED]
        hits = np.flatnonzero((block >= low) & (block < high))
        if len(hits):
            found.append(hits + first)
    return np.concatenate(found)


def positions(values: NDArray[np.integer], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions of ``values`` that are among ``wanted``, which is ascending."""
    if not len(wanted):
        return wanted
    low = int(wanted[0])
    high = int(wanted[-1]) + 1
    near = between(values, low, high)
    if high - low == len(wanted):
        return near
    among = np.zeros(high - low, np.bool_)
    among[wanted - low] = True
    return near[among[values[near].astype(np.int64) - low]]


def occurrences(values: NDArray[np.integer], value: int, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position in ``values`` of each of the occurrences ``wanted`` of ``value``: 0 for the first one, and so on; ascending."""
    found = [np.empty(0, np.int64)]
    seen = 0
    for first in range(0, len(values), SCANNED):
        same = values[first : first + SCANNED] == value
        begin = seen
        seen += int(np.count_nonzero(same))
        here = wanted[np.searchsorted(wanted, begin) : np.searchsorted(wanted, seen)]
        if len(here):
            found.append(np.flatnonzero(same)[here - begin] + first)
    return np.concatenate(found)
