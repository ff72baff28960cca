"""Limits on what other processes can put into the store of a run: rank 0 removes it every few seconds.

The keys of hpclm must be signed (``signed.py``). Those of PyTorch and torchrun are not, and their names are their own
affair, so only their sizes are limited: of each value, and of all together.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hpclm.distributed.signed import SignedStore

log = logging.getLogger(__name__)

PREFIX = "hpclm/"  # how the keys begin that ranks write through SignedStore
EVERY, CROWD = 5.0, 128  # seconds between two looks, with at most CROWD ranks; proportionally longer with more
LARGEST, PER_RANK = 1 << 16, 1 << 8  # bytes of an unsigned value: gloo lists the addresses of a whole group in one
TOGETHER = 32  # such values for each rank, in all its process groups
BATCH = 16  # keys read at once


class StoreLimits:
    """What rank 0 checks in the store of ``ranks`` ranks; it has a connection of its own."""

    def __init__(self, store: SignedStore, ranks: int):
        self.store = store.clone()
        self.store.raw.set_timeout(timedelta(seconds=2))  # reading waits for a key that has just been deleted
        self.largest = LARGEST + PER_RANK * ranks
        self.together = self.largest * TOGETHER * ranks
        self.interval = EVERY * max(1.0, ranks / CROWD)
        self._checked = time.monotonic()
        self._known: set[str] = set()
        """The keys of others that were there the last time."""
        self._warned = False

    def enforce(self) -> None:
        """Remove what exceeds the limits, unless the last look was a moment ago; the first removal is logged."""
        if time.monotonic() - self._checked < self.interval:
            return
        with suppress(RuntimeError):  # a key may disappear meanwhile
            self._remove(self._unsigned())
            self._remove(self._too_large())
        self._checked = time.monotonic()

    def _remove(self, foreign: Iterable[tuple[Any, str, bytes]]) -> None:
        for raw, key, data in foreign:
            if raw.compare_set(key, data, "") != b"":  # a rank has replaced it
                continue
            raw.delete_key(key)
            if not self._warned:
                self._warned = True
                log.warning(
                    "another process wrote %s (%d bytes) into the store of this run; it is removed, and whatever else exceeds the "
                    "limits (hpclm docs reliability, What is trusted)",
                    ascii(key)[1:-1][:64],
                    len(data),
                )

    def _unsigned(self) -> Iterator[tuple[Any, str, bytes]]:
        """hpclm's keys whose values no rank has signed."""
        raw: Any = self.store.raw
        for key, data in _entries(raw, (key for key in raw.list_keys() if key.startswith(PREFIX))):
            if self.store.opened(key, data) is None:
                yield raw, key, data

    def _too_large(self) -> Iterator[tuple[Any, str, bytes]]:
        """Other keys with values that are too large; once all together are, those that have come since the last look."""
        raw: Any = self.store.raw
        prefix = PREFIX
        if hasattr(raw, "underlying_store"):  # torchrun's, with the run id before each key of ours
            raw, prefix = raw.underlying_store, f"{self.store.run_id}/{PREFIX}"
        keys = sorted(
            (key for key in raw.list_keys() if not key.startswith(prefix)), key=lambda key: key not in self._known
        )
        total, self._known = 0, set()
        for key, data in _entries(raw, keys):
            if len(data) <= self.largest and total + len(key) + len(data) <= self.together:
                total += len(key) + len(data)
                self._known.add(key)
            else:
                yield raw, key, data


def _entries(raw: Any, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Keys and their values, which are read a batch at a time."""
    keys = [*keys]
    for start in range(0, len(keys), BATCH):
        batch = keys[start : start + BATCH]
        yield from zip(batch, raw.multi_get(batch), strict=True)
