"""Read or write the files of a dataset from start to end, and compute their content hashes (data/content.py) on the way."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpclm.data.content import BLOCK, DatasetContent, differing, hash_of_blocks, noted
from hpclm.data.indexed import IndexedDataset

TOKENS = 1 << 21  # tokens, sequences or documents that are read at a time; documents are not split


class Hasher:
    """Hashes a file that is passed from start to end in pieces of any size."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._block, self._room = xxhash.xxh3_64(), BLOCK

    def update(self, piece: Any) -> None:
        """Add the next bytes: anything with a contiguous buffer."""
        rest = memoryview(piece).cast("B")
        while len(rest):
            part, rest = rest[: self._room], rest[self._room :]
            self._block.update(part)
            self._room -= len(part)
            if not self._room:
                self._end_block()

    def end(self) -> tuple[str, str]:
        """The hash of the file, and those of its blocks; call it last."""
        if self._room < BLOCK:
            self._end_block()
        blocks = "".join(self._blocks)
        return hash_of_blocks(blocks), blocks

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block, self._room = xxhash.xxh3_64(), BLOCK


class HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, file: IO[bytes]):
        self.file, self.hasher = file, Hasher()

    def write(self, piece: Any) -> None:
        """Append to the file."""
        self.hasher.update(piece)
        self.file.write(piece)


def index_hash(dataset: IndexedDataset) -> str:
    """The hash of the index as it is now."""
    hasher = Hasher()
    hasher.update(dataset.raw_index())
    return hasher.end()[0]


@dataclass(frozen=True)
class Documents:
    """Consecutive documents of a dataset."""

    tokens: NDArray
    """[t] all sequences, concatenated."""
    sizes: NDArray[np.int64]
    """[s] tokens in each sequence."""
    per_document: NDArray[np.int64]
    """[k] sequences in each document."""
    modes: NDArray[np.int8] | None
    """[s] of multimodal datasets."""


class TokenReader:
    """Reads all tokens of a dataset in order, in constant memory; the index must have been checked.

    At the end of ``blocks`` or ``documents``: ConfigError if the tokens do not match the hashes in PREFIX.json, if it has
    any; with ``record`` they are not compared, and ``content`` gives the hashes.
    """

    def __init__(self, dataset: IndexedDataset, record: bool = False):
        self.dataset = dataset
        self.recorded = None if record else noted(dataset.prefix)
        self._hasher = Hasher() if record or self.recorded else None

    def blocks(self) -> Iterator[tuple[int, NDArray]]:
        """Tokens, and the place of the first one."""
        for begin in range(0, self.dataset.token_count, TOKENS):
            yield begin, self._read(begin, min(begin + TOKENS, self.dataset.token_count))
            self.dataset.release()
        self._compare()

    def documents(self) -> Iterator[Documents]:
        """Whole documents with at most ``TOKENS`` tokens in all, or one document."""
        dataset = self.dataset
        for begin, end in _document_ranges(dataset):
            bounds = dataset.bounds(begin, end)
            first, last = int(bounds[0]), int(bounds[-1])
            tokens = self._read(dataset.place(first), dataset.place(last))
            sizes = dataset.sizes[first:last].astype(np.int64)
            modes = None if dataset.modes is None else dataset.modes[first:last]
            yield Documents(tokens, sizes, np.diff(bounds), modes)
            dataset.release()
        self._compare()

    def content(self) -> DatasetContent:
        """The hashes of the dataset as it is now; with ``record``, after all tokens have been read."""
        tokens, blocks = (self._hasher or Hasher()).end()
        return DatasetContent(tokens, index_hash(self.dataset), blocks, time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    def _read(self, begin: int, end: int) -> NDArray:
        if self._hasher:
            self._hasher.update(self.dataset.raw(begin, end))
        return self.dataset.flat[begin:end]

    def _compare(self) -> None:
        if self._hasher and self.recorded:
            blocks = self._hasher.end()[1]
            if blocks != self.recorded.blocks:
                raise differing(self.dataset, self.recorded, blocks)


def _document_ranges(dataset: IndexedDataset) -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) of consecutive documents with at most ``TOKENS`` tokens and sequences in all (at least one document)."""
    begin, last, ahead = 0, dataset.document_count, 1024
    while begin < last:
        bounds = dataset.bounds(begin, min(begin + ahead, last))
        within = dataset.places(bounds) - dataset.place(int(bounds[0])) <= TOKENS
        within &= bounds - bounds[0] <= TOKENS
        count = max(1, int(np.count_nonzero(within)) - 1)
        yield begin, begin + count
        begin, ahead = begin + count, 2 * count + 1024
