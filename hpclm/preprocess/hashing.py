"""Read or write the files of a dataset from start to end, and compute their content hashes (data/content.py)."""

import time
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpclm.data.content import HASH_BLOCK_BYTES, DatasetContent, differing, hash_of_blocks
from hpclm.data.indexed import IndexedDataset

TOKENS = 1 << 21  # tokens, sequences or documents read at a time; documents are not split


class Hasher:
    """Hashes a file passed from start to end in pieces of any size."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._block = xxhash.xxh3_64()
        self._room = HASH_BLOCK_BYTES

    def update(self, piece: Any) -> None:
        """Add the next bytes, an object with a contiguous buffer."""
        rest = memoryview(piece).cast("B")
        while len(rest):
            part = rest[: self._room]
            rest = rest[self._room :]
            self._block.update(part)
            self._room -= len(part)
            if not self._room:
                self._end_block()

    def end(self) -> tuple[str, str]:
        """The hash of the file, and the hashes of its blocks; call it last."""
        if self._room < HASH_BLOCK_BYTES:
            self._end_block()
        blocks = "".join(self._blocks)
        return hash_of_blocks(blocks), blocks

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block = xxhash.xxh3_64()
        self._room = HASH_BLOCK_BYTES


class HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.hasher = Hasher()

    def write(self, piece: Any) -> None:
        """Append to the file."""
        self.hasher.update(piece)
        self.file.write(piece)


class Documents(NamedTuple):
    """Consecutive documents of a dataset."""

    tokens: NDArray
    """[t] all sequences, concatenated."""
    sizes: NDArray[np.int64]
    """[s] tokens in each sequence."""
    per_document: NDArray[np.int64]
    """[k] sequences in each document."""
    modes: NDArray[np.int8] | None
    """[s] modes of multimodal datasets."""


class TokenReader:
    """Reads all documents of a dataset in order, in constant memory; the index must have been checked.

    After the last document, ``content`` has the dataset's hashes; ConfigError if they differ from ``recorded``.
    """

    def __init__(self, dataset: IndexedDataset, recorded: DatasetContent | None):
        self.dataset = dataset
        self.recorded = recorded
        self._hasher = Hasher()
        self.content: DatasetContent | None = None

    def __iter__(self) -> Iterator[Documents]:
        """Batches of whole documents with at most ``TOKENS`` tokens together, or of one document."""
        dataset = self.dataset
        for begin, end in _document_ranges(dataset):
            bounds = dataset.bounds(begin, end)
            first = int(bounds[0])
            last = int(bounds[-1])
            places = dataset.place(first), dataset.place(last)
            self._hasher.update(dataset.raw(*places))
            sizes = dataset.sizes[first:last].astype(np.int64)
            modes = dataset.modes
            if modes is not None:
                modes = modes[first:last]
            yield Documents(dataset.flat[slice(*places)], sizes, np.diff(bounds), modes)
            dataset.release()
        tokens, blocks = self._hasher.end()
        if self.recorded and blocks != self.recorded.blocks:
            raise differing(dataset, self.recorded, blocks)
        index = Hasher()
        index.update(dataset.raw_index())
        self.content = DatasetContent(tokens, index.end()[0], blocks, time.strftime("%Y-%m-%dT%H:%M:%S%z"))


def _document_ranges(dataset: IndexedDataset) -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) of consecutive documents with at most ``TOKENS`` tokens and sequences together (at least one document)."""
    begin = 0
    last = dataset.document_count
    ahead = 1024
    while begin < last:
        bounds = dataset.bounds(begin, min(begin + ahead, last))
        within = dataset.places(bounds) - dataset.place(int(bounds[0])) <= TOKENS
        within &= bounds - bounds[0] <= TOKENS
        count = max(1, int(np.count_nonzero(within)) - 1)
        yield begin, begin + count
        begin += count
        ahead = 2 * count + 1024
