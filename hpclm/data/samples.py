"""Samples read from datasets on disk. Row: [S + 1] int64, the inputs and the last one's label; PADDING after a shorter one.

A sample costs a few lookups and one copy per document it crosses. The lookups go through memoryviews: of what Python
offers, these turn an index into a number the fastest.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.data.blend import Turns
from hpclm.data.blocks import Blocks
from hpclm.data.disk.indexed import IndexedDataset
from hpclm.data.order import Index
from hpclm.data.sources import PADDING, Samples
from hpclm.errors import ConfigError


class PackedSamples:
    """Megatron's samples: S + 1 tokens of the documents in an index's order, whatever documents they cross."""

    def __init__(self, dataset: IndexedDataset, index: Index):
        self.dataset, self.flat, self.width = dataset, dataset.flat, dataset.dtype.itemsize
        self._sizes, self._pointers = _view(dataset.sizes), _view(dataset.pointers)
        self._documents, self._shuffle = _view(index.documents), _view(index.shuffle)
        self._starts = _view(index.samples.reshape(-1))

    def __len__(self) -> int:
        return len(self._shuffle)

    def read(self, index: int, row: NDArray[np.int64]) -> None:
        """Fill ``row`` [S + 1] with sample ``index``."""
        sizes, pointers, documents, flat, width = self._sizes, self._pointers, self._documents, self.flat, self.width
        at = 2 * self._shuffle[index]
        place, offset = self._starts[at], self._starts[at + 1]
        filled, needed, last = 0, len(row), len(documents)
        while place < last:
            sequence = documents[place]
            begin = pointers[sequence] // width + offset
            size = sizes[sequence] - offset
            try:
                if size >= needed - filled:
                    row[filled:] = flat[begin : begin + needed - filled]
                    return
                row[filled : filled + size] = flat[begin : begin + size]
            except ValueError:
                raise ConfigError(
                    f"{self.dataset.bin_path}: sequence {sequence} does not lie where {self.dataset.idx_path} says; "
                    f"see what is wrong with: hpclm data verify {self.dataset.prefix}"
                ) from None
            filled += size
            place += 1
            offset = 0
        row[filled:] = PADDING


class BlockSamples:
    """fairseq's samples: a block is what is learned, and the tokens one place before it are the inputs."""

    def __init__(self, flat: NDArray, blocks: Blocks, order: NDArray[np.integer], eos: int):
        """``flat``: the tokens that the blocks count; ``eos``: what stands before a block that begins with a line."""
        self.flat, self.eos = flat, eos
        self._bounds, self._fresh, self._order = _view(blocks.bounds.reshape(-1)), _view(blocks.fresh), _view(order)

    def __len__(self) -> int:
        return len(self._order)

    def read(self, index: int, row: NDArray[np.int64]) -> None:
        """Fill ``row`` [S + 1] with sample ``index``."""
        block = self._order[index]
        begin, end = self._bounds[2 * block], self._bounds[2 * block + 1]
        row[0] = self.eos if self._fresh[block] else self.flat[begin - 1]
        row[1 : 1 + end - begin] = self.flat[begin:end]
        row[1 + end - begin :] = PADDING


class BlendedSamples:
    """Samples of several datasets in turns."""

    def __init__(self, parts: Sequence[Samples], turns: Turns):
        self._parts, self._which, self._index = list(parts), _view(turns.which), _view(turns.index)

    def __len__(self) -> int:
        return len(self._which)

    def read(self, index: int, row: NDArray[np.int64]) -> None:
        """Fill ``row`` [S + 1] with sample ``index``."""
        self._parts[self._which[index]].read(self._index[index], row)


def _view(array: NDArray) -> "memoryview[int]":
    """A one-dimensional array, aligned or not, as a view that gives Python numbers."""
    plain: Any = np.asarray(array)
    kind: Any = plain.dtype.char
    return memoryview(plain.view(np.uint8)).cast(kind) if plain.size else memoryview(b"")
