"""Samples to micro-batches, prefetched: the samples of a step depend only on the number of samples consumed before it.

B sequences in a micro-batch, T tokens in a sequence, R data-parallel replicas. Each replica gets one of every R consecutive micro-batches,
as with Megatron's sequential sampler.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig, ModelConfig, Plan
from hpclm.data.exclusion import Exclusion
from hpclm.data.pieces import sample_hash
from hpclm.data.sources import PADDING, Samples, needs_eod
from hpclm.node import hardware
from hpclm.parallel.mesh import Compute
from hpclm.parallel.micro_batch import MicroBatch

T = TypeVar("T")


class Batches:
    """The micro-batches of any step of one replica."""

    def __init__(
        self,
        samples: Samples,
        plan: Plan,
        data: DataConfig,
        model: ModelConfig,
        eod: int | None,
        compute: Compute,
        exclusion: Exclusion | None = None,
    ):
        """``eod``: the end-of-document token. ``compute``: device and replica of the micro-batches. ``exclusion``: documents to leave
        out."""
        lacking = list(needs_eod(data, eod))
        if lacking:
            raise ConfigError(lacking)
        self.samples: Any = samples
        self.plan = plan
        self.data = data
        self.device = compute.device
        self.replica = compute.mesh.replica
        self.cp = compute.mesh.cp
        self.width = model.context + 1
        self.vocab_size = model.vocab_size
        self.eod = eod
        self.exclusion = exclusion
        if np.dtype(samples.dtype).kind not in "iu":
            raise ConfigError(f"data.source={data.source} has rows of {samples.dtype}, not of integers")
        self.dtype = np.dtype(samples.dtype)
        if model.vocab_size > np.iinfo(self.dtype).max or exclusion:
            self.dtype = np.dtype(np.int64)
        self.unset = int(np.iinfo(self.dtype).max)
        """Initial value of each entry of a row; not a token."""
        self.hash = 0
        """Sum of ``sample_hash`` of this replica's samples in the last step, modulo 2**64."""
        self._ahead = Prefetch(
            lambda consumed: list(self._read(consumed, plan.batch_size(consumed))),
            lambda consumed: consumed + plan.batch_size(consumed),
            data.workers,
            partial(hardware.use, compute.device),
        )

    def step(self, consumed: int) -> list[MicroBatch]:
        """The micro-batches of the step that begins after ``consumed`` samples."""
        batches = self._ahead(consumed)
        self.hash = sum(loaded.hash for loaded in batches) % 2**64
        return [self._place(loaded) for loaded in batches]

    def take(self, start: int, count: int) -> Iterator[MicroBatch]:
        """Samples ``start`` to ``start + count``, one micro-batch at a time; past the end the samples repeat.

        All micro-batches have the same shape: missing samples are masked copies of the last sample.
        """
        return map(self._place, self._read(start, count))

    def close(self) -> None:
        """Stop the threads that prefetch."""
        self._ahead.close()

    def _read(self, start: int, count: int) -> "Iterator[_Loaded]":
        """This replica's micro-batches of the samples ``start`` to ``start + count``."""
        size = self.plan.micro_size
        stride = self.plan.micro_size * self.plan.data
        end = start + count
        for begin in range(start + self.replica * size, end + self.replica * size, stride):
            loaded = self._load([min(index, end - 1) for index in range(begin, begin + size)])
            if begin + size > end:
                # a replica that ran fewer passes, or compiled for another shape, would make the others wait
                counted = torch.arange(begin, begin + size) < end
                mask = loaded.loss_mask
                if mask is None:
                    mask = torch.ones_like(loaded.rows[:, 1:], dtype=torch.bool)
                loaded = loaded._replace(loss_mask=mask & counted[:, None])
            yield loaded

    def _load(self, indices: Sequence[int]) -> "_Loaded":
        rows = np.full((len(indices), self.width), self.unset, self.dtype)
        read = self.samples.read
        length = len(self.samples)
        for row, index in zip(rows, indices, strict=True):
            read(index % length, row)
        removed = None
        if self.exclusion is not None:
            replace = self.exclusion.replace
            removed = np.stack(
                [replace(self.samples, index % length, row) for row, index in zip(rows, indices, strict=True)]
            )
        padded = self._check(rows, indices)
        wide = rows.astype(np.int64)
        total = sum(map(sample_hash, wide))
        mask = positions = documents = None
        if padded:
            mask = wide[:, 1:] != PADDING
            wide = np.maximum(wide, 0)
        tokens = wide[:, :-1]
        if self.data.eod_mask_loss:
            inside = tokens != self.eod
            if mask is not None:
                inside &= mask
            mask = inside
        number = None
        if self.data.order == "packed":
            number = np.empty_like(wide)
            counted = np.empty(wide.shape, np.bool_)
            for index, *marks in zip(indices, number, counted, strict=True):
                self.samples.read_documents(index % length, *marks)
            number = number[:, :-1]
            mask = counted[:, 1:]
        if self.data.reset_attention_mask or self.data.reset_position_ids:
            if number is None:
                ends = tokens == self.eod  # an end-of-document token belongs to the document that it ends
                number = np.cumsum(ends, 1) - ends
            if self.data.reset_attention_mask:
                documents = number
            if self.data.reset_position_ids:
                positions = _restarted(number)
        if removed is not None and removed.any():
            inside = ~(removed[:, :-1] | removed[:, 1:])
            mask = inside if mask is None else mask & inside
        return _Loaded(total, *(self._tensor(x) for x in (wide, mask, positions, documents)))

    def _tensor(self, values: NDArray | None) -> Any:
        if values is None:
            return None
        tensor = torch.from_numpy(values)
        if self.device.type == "cuda":  # copies from pinned memory are asynchronous
            tensor = tensor.pin_memory()
        return tensor

    def _check(self, rows: NDArray[np.integer], indices: Sequence[int]) -> bool:
        """Whether some samples are padded; ConfigError if a token is outside the model's vocabulary."""
        low = int(rows.min())
        high = int(rows.max())
        padded = low == PADDING
        if padded:
            low = int(rows.min(where=rows != PADDING, initial=0))
        if high >= self.vocab_size or low < 0:
            row, column = np.argwhere((rows >= self.vocab_size) | ((rows < 0) & (rows != PADDING)))[0]
            if rows[row, column] == self.unset:
                raise ConfigError(
                    f"data.source={self.data.source} sets only {column} of the {self.width} tokens of sample {indices[row]}; fill the row, "
                    "and pad a shorter sample with hpclm.data.sources.PADDING"
                )
            raise ConfigError(
                f"sample {indices[row]} holds token {rows[row, column]}, outside model.vocab_size={self.vocab_size}; "
                f"set model.vocab_size to the tokenizer's size, or check the dataset"
            )
        return padded

    def _place(self, loaded: "_Loaded") -> MicroBatch:
        moved: list[Any] = [None if x is None else x.to(self.device, non_blocking=True) for x in loaded[1:]]
        rows, *others = moved
        # views, because two copies would take as long as reading
        whole = MicroBatch(rows[:, :-1], rows[:, 1:], *others)
        return whole.part(self.cp)


class _Loaded(NamedTuple):
    """A micro-batch on the CPU: the sum of the hashes of its samples; rows [B, T + 1] hold tokens and labels; for the rest see MicroBatch."""

    hash: int
    rows: Tensor
    loss_mask: Tensor | None
    positions: Tensor | None
    documents: Tensor | None


def _restarted(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, T] document indices -> positions that start at 0 in each document."""
    index = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    starts = np.diff(documents, axis=1, prepend=-1) != 0
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


class Prefetch(Generic[T]):
    """Calls ``make(key)`` ahead of time for the next keys.

    ``following`` returns the key after a key. Values depend only on their key, so neither the number of threads nor the order of
    requests changes results; threads=0 computes values on request.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        following: Callable[[int], int],
        threads: int,
        begin: Callable[[], None] | None = None,
    ):
        """``begin``: a function that each thread calls first."""
        self._make = make
        self._following = following
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "prefetch", begin) if threads else None
        self._coming: dict[int, Future[T]] = {}

    def __call__(self, key: int) -> T:
        """The result of ``make(key)``, or its exception."""
        if self._pool is None:
            return self._make(key)
        keys = [key]
        for _ in range(self._threads + 1):
            keys.append(self._following(keys[-1]))
        for stale in set(self._coming) - set(keys):
            self._coming.pop(stale).cancel()
        for ahead in keys:
            if ahead not in self._coming:
                self._coming[ahead] = self._pool.submit(self._make, ahead)
        return self._coming.pop(key).result()

    def close(self) -> None:
        """Stop prefetching; calls in progress finish."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
