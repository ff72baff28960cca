"""Samples read from datasets on disk. A row is [S + 1] tokens: the inputs, and the label of the last one; PADDING at the end of shorter
samples.

Reading a sample takes a few lookups, and one copy for each of its documents. Lookups and copies use memoryviews, Python's fastest way to
index numbers and to copy a few hundred tokens of one type.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError
from hpclm.data.blend import BlendIndex
from hpclm.data.indexed import IndexedDataset
from hpclm.data.order import Blocks, SampleIndex
from hpclm.data.packing import Packing
from hpclm.data.pieces import Piece, between, occurrences, positions
from hpclm.data.sources import PADDING

WIDE = np.dtype(np.int64)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Positions of sequences in a dataset; only those of ``span`` are read."""

    sizes: NDArray[np.int32]
    """[n] tokens in each sequence."""
    pointers: NDArray[np.int64]
    """[n] offset of each sequence in ``.bin``, in bytes."""
    span: range


class PackedSamples:
    """Megatron's samples: S + 1 tokens of the concatenated documents in the order of an index."""

    def __init__(
        self,
        dataset: IndexedDataset,
        index: SampleIndex,
        keep_partial: bool = False,
        sequences: Sequences | None = None,
    ):
        """``sequences``: the sequences to which ``index`` refers; None: the dataset's."""
        sequences = sequences or Sequences(dataset.sizes, dataset.pointers, range(len(dataset)))
        self.dataset = dataset
        self.datasets = [dataset]
        self.dtype = WIDE if keep_partial else dataset.flat.dtype
        self._same = dataset.flat.dtype
        self._flat = _view(dataset.flat)
        columns = (index.shuffle, index.samples.reshape(-1), index.documents, sequences.sizes, sequences.pointers)
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
        at = 2 * shuffle[index]
        width = self._width
        place = starts[at]
        offset = starts[at + 1]
        filled = 0
        needed = len(row)
        last = len(documents)
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

    def pieces(self, index: int) -> Iterator[Piece]:
        """The pieces of sample ``index``; see Traceable."""
        shuffle, starts, documents, sizes, pointers = self._columns
        at = 2 * shuffle[index]
        place, offset, last, end = starts[at : at + 4]
        filled = 0
        while place <= last:
            sequence = documents[place]
            size = sizes[sequence] - offset
            if place == last:
                size = end + 1 - offset  # the first token of the next sample is the last label of this one
            if size:
                yield Piece(filled, 0, pointers[sequence] // self._width + offset, size)
            filled += size
            place += 1
            offset = 0

    def find(self, dataset: int, begin: int, end: int) -> NDArray[np.int64]:
        """The samples that read these tokens; see Traceable."""
        shuffle, starts, documents, sizes, pointers = self._columns
        first = max(0, bisect_right(pointers, begin * self._width) - 1)
        last = bisect_left(pointers, end * self._width)
        found = [np.empty(0, np.int64)]
        samples = range(len(shuffle))
        for place in between(np.asarray(documents), first, last).tolist():
            sequence = documents[place]
            before = pointers[sequence] // self._width
            low = max(begin - before, 0)
            high = min(end - before, sizes[sequence])
            if low < high:
                # rows of starts are ascending; that of the next sample is the last token of this one
                lowest = bisect_left(samples, (place, low), key=lambda i: (starts[2 * i + 2], starts[2 * i + 3]))
                highest = bisect_left(samples, (place, high), key=lambda i: (starts[2 * i], starts[2 * i + 1]))
                found.append(np.arange(lowest, highest))
        return positions(np.asarray(shuffle), np.unique(np.concatenate(found)))


class BlockSamples:
    """fairseq's samples: a block is the labels, and the tokens shifted by one are the inputs."""

    dtype = WIDE

    def __init__(self, dataset: IndexedDataset, first: int, blocks: Blocks, order: NDArray[np.integer], eos: int):
        """``first``: the token of the dataset that the blocks count from; ``eos``: the input before a block that starts with a line."""
        self.datasets = [dataset]
        self.flat = dataset.flat[first:]
        self.eos = eos
        self._first = first
        self._blocks = blocks
        self._bounds = _view(blocks.bounds.reshape(-1))
        self._fresh = _view(blocks.fresh)
        self._order = _view(order)

    def __len__(self) -> int:
        return len(self._order)

    def read(self, index: int, row: NDArray[np.integer]) -> None:
        """Fill ``row`` [S + 1] with sample ``index``."""
        block = self._order[index]
        begin = self._bounds[2 * block]
        end = self._bounds[2 * block + 1]
        row[0] = self.eos
        if not self._fresh[block]:
            row[0] = self.flat[begin - 1]
        row[1 : 1 + end - begin] = self.flat[begin:end]
        row[1 + end - begin :] = PADDING

    def pieces(self, index: int) -> Iterator[Piece]:
        """The pieces of sample ``index``; see Traceable."""
        block = self._order[index]
        at = int(self._fresh[block])
        begin = self._bounds[2 * block] - 1 + at
        yield Piece(at, 0, self._first + begin, self._bounds[2 * block + 1] - begin)

    def find(self, dataset: int, begin: int, end: int) -> NDArray[np.int64]:
        """The samples that read these tokens; see Traceable."""
        firsts = self._blocks.bounds[:, 0] - 1 + self._blocks.fresh
        reads = (firsts < end - self._first) & (self._blocks.bounds[:, 1] > begin - self._first)
        return positions(np.asarray(self._order), np.flatnonzero(reads))


class DocumentSamples:
    """Whole documents, several in a sample (data.order=packed)."""

    dtype = WIDE

    def __init__(self, dataset: IndexedDataset, mask: NDArray | None, packing: Packing, order: NDArray[np.integer]):
        """``mask``: 1 for each token of the dataset that counts in the loss; None: all count."""
        self.datasets = [dataset]
        self.flat = dataset.flat
        self.mask = mask
        self._packing = packing
        self._starts, self._sizes, self._bounds = (
            _view(array) for array in (packing.starts, packing.sizes, packing.bounds)
        )
        self._order = _view(order)

    def __len__(self) -> int:
        return len(self._order)

    def read(self, index: int, row: NDArray[np.integer]) -> None:
        """Fill ``row`` [S + 1] with sample ``index``."""
        filled = 0
        for at, _, begin, size in self.pieces(index):
            filled = at + size
            row[at:filled] = self.flat[begin : begin + size]
        row[filled:] = PADDING

    def read_documents(self, index: int, documents: NDArray[np.integer], counted: NDArray[np.bool_]) -> None:
        """The document of each token of sample ``index``, and whether it counts in the loss as a label, [S + 1] each.

        The first token of a document does not count. Padding is a separate document, and does not count.
        """
        number = filled = 0
        counted[:] = False
        for number, (at, _, begin, size) in enumerate(self.pieces(index), 1):
            filled = at + size
            documents[at:filled] = number - 1
            counted[at + 1 : filled] = True
            if self.mask is not None:
                counted[at + 1 : filled] = self.mask[begin + 1 : begin + size] == 1
        documents[filled:] = number

    def pieces(self, index: int) -> Iterator[Piece]:
        """The pieces of sample ``index``; see Traceable."""
        sample = self._order[index]
        at = 0
        for piece in range(self._bounds[sample], self._bounds[sample + 1]):
            yield Piece(at, 0, self._starts[piece], self._sizes[piece])
            at += self._sizes[piece]

    def find(self, dataset: int, begin: int, end: int) -> NDArray[np.int64]:
        """The samples that read these tokens; see Traceable."""
        starts, sizes, bounds = self._packing.starts, self._packing.sizes, self._packing.bounds
        longest = int(sizes.max(initial=0))
        near = between(starts, begin - longest + 1, end)
        reads = near[starts[near] + sizes[near] > begin]
        return positions(np.asarray(self._order), np.unique(np.searchsorted(bounds, reads, "right") - 1))


class BlendedSamples:
    """Samples of several datasets, interleaved."""

    def __init__(self, parts: Sequence[Any], blend_index: BlendIndex):
        """``parts``: Samples; either all or none are DocumentSamples."""
        types = {part.dtype for part in parts}
        self.dtype = types.pop() if len(types) == 1 else WIDE
        self.datasets = [part.datasets[0] for part in parts]
        self._parts = parts
        self._reads = [part.read for part in parts]
        self._which = _view(blend_index.which)
        self._index = _view(blend_index.index)

    def __len__(self) -> int:
        return len(self._which)

    def read(self, index: int, row: NDArray[np.integer]) -> None:
        """Fill ``row`` [S + 1] with sample ``index``."""
        self._reads[self._which[index]](self._index[index], row)

    def read_documents(self, index: int, documents: NDArray[np.integer], counted: NDArray[np.bool_]) -> None:
        """See DocumentSamples; only if the parts are DocumentSamples."""
        self._parts[self._which[index]].read_documents(self._index[index], documents, counted)

    def pieces(self, index: int) -> Iterator[Piece]:
        """The pieces of sample ``index``; see Traceable."""
        which = self._which[index]
        for piece in self._parts[which].pieces(self._index[index]):
            yield piece._replace(dataset=which)

    def find(self, dataset: int, begin: int, end: int) -> NDArray[np.int64]:
        """The samples that read these tokens; see Traceable."""
        return occurrences(np.asarray(self._which), dataset, self._parts[dataset].find(0, begin, end))


def _view(array: NDArray) -> "memoryview[int]":
    """A one-dimensional array, aligned or not, as a memoryview of Python numbers."""
    plain: Any = np.asarray(array)
    if not plain.size:
        return memoryview(b"")
    kind: Any = plain.dtype.char
    return memoryview(plain.view(np.uint8)).cast(kind)
