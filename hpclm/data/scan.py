"""Checks that an index matches its ``.bin``: only at both ends, which is cheap, or completely, in constant memory. The processes on a
node share the results."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError
from hpclm.data.formats import IndexFile

ITEMS_PER_CHECK = 1 << 18  # sequences or document bounds checked at a time
T = TypeVar("T")


def check_ends(index: IndexFile, idx: Path, bin: Path, size: int) -> None:
    """ConfigError unless the first and last sequence and document bound match ``size``, the bytes of ``.bin``."""
    n = len(index.sizes)
    width = index.dtype.itemsize
    end = 0
    if n:
        start = int(index.starts[-1])
        tokens = int(index.sizes[-1])
        if tokens < 0:
            raise _negative(idx, n - 1, tokens)
        if index.starts[0] != 0:
            raise _misplaced(idx, 0, 0, int(index.starts[0]))
        end = start + tokens * width
    if end != size:
        raise ConfigError(
            f"{bin} is {size} bytes long, but {idx} describes {end}: one of them is truncated or belongs to another dataset"
        )
    if size % width:
        raise ConfigError(
            f"{bin} is {size} bytes long, which is not a multiple of {width}, the bytes of a token: it is truncated"
        )
    if index.documents is not None:
        ends = index.documents[[0, -1]].tolist() if len(index.documents) else []
        if ends != [0, n]:
            raise ConfigError(f"{idx}: document bounds must go from 0 to {n}, the number of sequences, but go {ends}")


def check_all(index: IndexFile, idx: Path, size: int, progress: Callable[[int], object] = lambda entries: None) -> None:
    """ConfigError for the first sequence or document bound that does not follow the previous one; call after ``check_ends``.

    ``progress``: called with numbers of checked sequences and bounds.
    """
    n = len(index.sizes)
    width = index.dtype.itemsize
    end = 0
    last = size
    for start in range(0, n, ITEMS_PER_CHECK):
        sizes = index.sizes[start : start + ITEMS_PER_CHECK].astype(np.int64)
        if sizes.min() < 0:
            place = int(np.argmax(sizes < 0))
            raise _negative(idx, start + place, int(sizes[place]))
        if sizes.max() > last:  # so that no sum can overflow
            place = int(np.argmax(sizes > last))
            raise ConfigError(
                f"{idx}: sequence {start + place} has {sizes[place]} tokens, but all tokens together have {size} bytes"
            )
        expected = end + np.concatenate(([0], np.cumsum(sizes * width)))
        actual = index.starts[start : start + ITEMS_PER_CHECK]
        wrong = expected[:-1] != actual
        if wrong.any():
            place = int(np.argmax(wrong))
            raise _misplaced(idx, start + place, int(expected[place]), int(actual[place]))
        end = int(expected[-1])
        if end > last:
            raise ConfigError(f"{idx}: sequence {start + len(sizes) - 1} ends past the tokens' {size} bytes")
        progress(len(sizes))
    if index.documents is not None:
        _check_documents(index.documents, idx, progress)


def _check_documents(documents: NDArray[np.int64], idx: Path, progress: Callable[[int], object]) -> None:
    for start in range(0, len(documents) - 1, ITEMS_PER_CHECK):
        block = documents[start : start + ITEMS_PER_CHECK + 1]
        falls = block[1:] < block[:-1]
        if falls.any():
            place = int(np.argmax(falls))
            raise ConfigError(
                f"{idx}: document bounds must not decrease; document {start + place} goes from sequence {block[place]} "
                f"to {block[place + 1]}: the index is damaged"
            )
        progress(len(block) - 1)


def _negative(idx: Path, sequence: int, size: int) -> ConfigError:
    return ConfigError(f"{idx}: sequence {sequence} has a negative size, {size}")


def _misplaced(idx: Path, sequence: int, expected: int, actual: int) -> ConfigError:
    return ConfigError(
        f"{idx}: sequence {sequence} should start at byte {expected} of the tokens, where the previous one ends, "
        f"but the index says {actual}"
    )


class SharedFacts:
    """Facts by name. One process collects them while it opens the data, and passes them to other processes.

    The names include the lengths and dates of files, so that a process that sees other files finds no facts and reads the files.
    """

    def __init__(self, values: Mapping[str, Any] | None = None):
        """``values``: the facts of another process (JSON)."""
        self.values: dict[str, Any] = dict(values or {})

    def find(self, name: str, read: Callable[[], T]) -> T:
        """The fact ``name``; if it is unknown, the result of ``read`` (JSON)."""
        if name not in self.values:
            self.values[name] = read()
        fact: T = self.values[name]
        return fact

    def once(self, name: str, check: Callable[[], object]) -> None:
        """Run ``check``, unless it is known to have passed."""
        if name not in self.values:
            check()
            self.values[name] = True
