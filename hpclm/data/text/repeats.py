"""Deduplication with little memory: hashes of documents in a B-tree on disk (sqlite).

A Bloom filter of fixed size recognises most new documents, so few are looked up in the tree, which grows in sorted batches. It
needs 25 to 35 bytes of disk per new document, in an unlinked file, so that nothing is left if the process is killed.
"""

import errno
import os
import secrets
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

TREE = 32  # MiB of the tree in memory
FILTER = 1 << 26  # bytes of the filter: one needless lookup in a thousand up to 50 million documents
BATCH = 1 << 18  # hashes that are inserted into the tree at a time


class Repeats:
    """Remembers hashes in a file next to ``path`` during the ``with`` block; OSError if the disk is full."""

    def __init__(self, path: Path):
        self._path = path.with_name(f"{path.name}.seen-{os.getpid()}-{secrets.token_hex(3)}")
        self._bits = np.zeros(FILTER, np.uint8)
        self._waiting: set[bytes] = set()

    def __enter__(self) -> "Repeats":
        import sqlite3

        self._error = sqlite3.Error
        self._tree = sqlite3.connect(self._path, isolation_level=None)
        try:
            # a scratch file with one connection, unlinked as soon as it is open
            for pragma in (
                "journal_mode=OFF",
                "synchronous=OFF",
                "locking_mode=EXCLUSIVE",
                f"cache_size={-1024 * TREE}",
            ):
                self._tree.execute(f"PRAGMA {pragma}")
            self._tree.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
            self._tree.execute("BEGIN")
        except self._error as error:
            raise self._full(error) from error
        finally:
            self._path.unlink(missing_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._tree.close()

    def new(self, digests: NDArray[np.void]) -> NDArray[np.bool_]:
        """[k] hashes of 16 bytes -> [k] whether each one is seen for the first time."""
        words = np.frombuffer(digests.tobytes(), "<u4").reshape(-1, 4)
        places, bits = words % FILTER, np.uint8(1) << (words >> 29).astype(np.uint8)
        new = ((self._bits[places] & bits) == 0).any(axis=1)
        first = np.zeros(len(new), bool)
        first[np.unique(words[:, 0], return_index=True)[1]] = True
        new &= first
        np.bitwise_or.at(self._bits, places, bits)
        every = digests.tolist()
        self._waiting.update(every[i] for i in np.flatnonzero(new))
        for i in np.flatnonzero(~new):  # probably seen before
            if every[i] not in self._waiting and not self._in_tree(every[i]):
                new[i] = True
                self._waiting.add(every[i])
        if len(self._waiting) > BATCH:
            self._insert()
        return new

    def _in_tree(self, digest: bytes) -> bool:
        try:
            return self._tree.execute("SELECT 1 FROM seen WHERE digest = ?", (digest,)).fetchone() is not None
        except self._error as error:
            raise self._full(error) from error

    def _insert(self) -> None:
        try:
            self._tree.executemany("INSERT INTO seen VALUES (?)", ((digest,) for digest in sorted(self._waiting)))
        except self._error as error:
            raise self._full(error) from error
        self._waiting.clear()

    def _full(self, error: Exception) -> OSError:
        return OSError(errno.ENOSPC, f"the hashes for --deduplicate cannot be stored: {error}", str(self._path))
