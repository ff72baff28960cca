"""Samples read from datasets on disk. A row is [S + 1] tokens: the inputs, and the label of the last one; PADDING at the end of shorter samples.

A sample costs a few lookups and one copy per document it spans. Both use memoryviews, the fastest way in Python to index numbers
and to copy a few hundred tokens of one type.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.data.blend import BlendIndex
from hpclm.data.indexed import IndexedDataset
from hpclm.data.order import Blocks, SampleIndex
from hpclm.data.sources import PADDING, Samples
from hpclm.errors import ConfigError

WIDE = np.dtype(np.int64)


class PackedSamples:
    """Megatron's samples: S + 1 tokens of the concatenated documents in the order of an index."""

    def __init__(self, dataset: IndexedDataset, index: SampleIndex, keep_partial: bool = False):
        self.dataset = dataset
        self.dtype = WIDE if keep_partial else dataset.flat.dtype
        self._same, self._flat = dataset.flat.dtype, _view(dataset.flat)
        columns = (index.shuffle, index.samples.reshape(-1), index.documents, dataset.sizes, dataset.pointers)
        self._columns = tuple(map(_view, columns))
        self._width = dataset.dtype.itemsize

    def __len__(self) -> int:
        return len(self._columns[0])

    def read(self, index: int, row: NDArray[np.integer]) -> None:
        """Fill ``row`` [S + 1] with sample ``index``."""
        shuffle, starts, documents, sizes, pointers = self._columns
        source: Any = self._flat
        target: Any = row
        if row.dtype is self._same:  # numpy types are singletons
            target = memoryview(target)
        else:
            source = self.dataset.flat  # numpy converts the type
        at, width = 2 * shuffle[index], self._width
        place, offset = starts[at], starts[at + 1]
        filled, needed, last = 0, len(row), len(documents)
        try:
            while place < last:
                sequence = documents[place]
                begin = pointers[sequence] // width + offset
                size = sizes[sequence] - offset
                if size >= needed - filled:
                    target[filled:] = source[begin : begin + needed - filled]
                    return
                target[filled : filled + size] = source[begin : begin + size]
                filled += size
                place += 1
                offset = 0
        except (ValueError, IndexError):
            raise ConfigError(
                f"{self.dataset.prefix}: sample {index} is not at the indexed position; hpclm data verify "
                f"{self.dataset.prefix} shows whether the dataset is corrupt; if not, remove {self.dataset.prefix}.index"
            ) from None
        row[filled:] = PADDING


class BlockSamples:
    """fairseq's samples: a block is the labels, and the tokens shifted by one are the inputs."""

    dtype = WIDE

    def __init__(self, flat: NDArray, blocks: Blocks, order: NDArray[np.integer], eos: int):
        """``flat``: the tokens that the blocks index; ``eos``: the input before a block that starts with a line."""
        self.flat, self.eos = flat, eos
        self._bounds, self._fresh, self._order = _view(blocks.bounds.reshape(-1)), _view(blocks.fresh), _view(order)

    def __len__(self) -> int:
        return len(self._order)

    def read(self, index: int, row: NDArray[np.integer]) -> None:
        """Fill ``row`` [S + 1] with sample ``index``."""
        block = self._order[index]
        begin, end = self._bounds[2 * block], self._bounds[2 * block + 1]
        row[0] = self.eos if self._fresh[block] else self.flat[begin - 1]
        row[1 : 1 + end - begin] = self.flat[begin:end]
        row[1 + end - begin :] = PADDING


class BlendedSamples:
    """Samples of several datasets, interleaved."""

    def __init__(self, parts: Sequence[Samples], blend_index: BlendIndex):
        types = {part.dtype for part in parts}
        self.dtype = types.pop() if len(types) == 1 else WIDE
        self._reads = [part.read for part in parts]
        self._which, self._index = _view(blend_index.which), _view(blend_index.index)

    def __len__(self) -> int:
        return len(self._which)

    def read(self, index: int, row: NDArray[np.integer]) -> None:
        """Fill ``row`` [S + 1] with sample ``index``."""
        self._reads[self._which[index]](self._index[index], row)


def _view(array: NDArray) -> "memoryview[int]":
    """A one-dimensional array, aligned or not, as a memoryview of Python numbers."""
    plain: Any = np.asarray(array)
    kind: Any = plain.dtype.char
    return memoryview(plain.view(np.uint8)).cast(kind) if plain.size else memoryview(b"")
