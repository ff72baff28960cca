"""Samples to micro-batches: which samples a step reads is a function of the samples consumed before it, and nothing else.

B sequences in a micro-batch, T tokens in a sequence, R data-parallel replicas. Each R micro-batches in a row are one for
every replica, as Megatron's sequential sampler deals them out.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpclm.config import Plan, RunConfig
from hpclm.data.prefetch import Prefetch
from hpclm.data.sources import PADDING, Samples
from hpclm.errors import ConfigError


class Batch(NamedTuple):
    """One micro-batch on the device."""

    tokens: Tensor  # [B, T] int64; this and labels may be views of one tensor, and not contiguous
    labels: Tensor  # [B, T] int64: the token after each
    loss_mask: Tensor | None  # [B, T] bool: what counts in the loss; None: everything
    positions: Tensor | None  # [B, T] int64, where they restart inside the sample
    documents: Tensor | None  # [B, T] int64, number of the document, where attention stays inside it


class Batches:
    """The micro-batches of any step of one replica."""

    def __init__(
        self,
        samples: Samples,
        config: RunConfig,
        plan: Plan,
        eod: int | None,
        device: torch.device,
        replica: int = 0,
    ):
        data = config.data
        wanted = [
            name
            for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
            if getattr(data, name) and eod is None
        ]
        if wanted:
            raise ConfigError(
                f"data.{wanted[0]} needs the end-of-document token, which the dataset does not name; "
                f"set data.tokenizer and data.tokenizer_files"
            )
        self.samples, self.plan, self.data, self.device, self.replica = samples, plan, data, device, replica
        self.width, self.vocab_size, self.eod = config.model.context + 1, config.model.vocab_size, eod
        self._ahead = Prefetch(self._read_step, lambda consumed: consumed + plan.batch_size(consumed), data.workers)

    def step(self, consumed: int) -> list[Batch]:
        """The micro-batches of the step that begins when ``consumed`` samples have been read."""
        return [self._place(batch) for batch in self._ahead(consumed)]

    def take(self, start: int, count: int) -> list[Batch]:
        """Samples ``start`` to ``start + count``, in micro-batches; past the end the samples begin anew."""
        return [self._place(batch) for batch in self._read(start, count)]

    def _read_step(self, consumed: int) -> list[Batch]:
        return list(self._read(consumed, self.plan.batch_size(consumed)))

    def _read(self, start: int, count: int) -> Iterator[Batch]:
        """This replica's micro-batches of those samples, in pinned memory where the device is a GPU."""
        size, stride = self.plan.micro_size, self.plan.micro_size * self.plan.data
        for begin in range(start + self.replica * size, start + count, stride):
            batch = self._batch(range(begin, min(begin + size, start + count)))
            yield _each(batch, Tensor.pin_memory) if self._on_gpu else batch

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _batch(self, indices: range) -> Batch:
        rows = np.empty((len(indices), self.width), self.samples.dtype)
        read, length = self.samples.read, len(self.samples)
        for row, index in zip(rows, indices, strict=True):
            read(index % length, row)
        padded = self._check(rows, indices)
        wide = rows.astype(np.int64)
        tokens, labels = wide[:, :-1], wide[:, 1:]  # views: two copies would take as long as reading did
        mask = positions = documents = None
        if padded:
            mask = labels != PADDING
            tokens, labels = np.maximum(tokens, 0), np.maximum(labels, 0)
        if self.data.eod_mask_loss:
            inside = tokens != self.eod
            mask = inside if mask is None else mask & inside
        if self.data.reset_attention_mask or self.data.reset_position_ids:
            number = np.cumsum(tokens == self.eod, 1) - (tokens == self.eod)  # an end-of-document token ends its own
            documents = number if self.data.reset_attention_mask else None
            positions = _restarted(number) if self.data.reset_position_ids else None
        arrays = (tokens, labels, mask, positions, documents)
        tensors: list[Any] = [None if x is None else torch.from_numpy(x) for x in arrays]
        return Batch(*tensors)

    def _check(self, rows: NDArray[np.integer], indices: range) -> bool:
        """Whether some samples are short; ConfigError where a token is none of the model's."""
        low, high = int(rows.min()), int(rows.max())
        padded = low == PADDING
        if padded:
            low = int(rows.min(where=rows != PADDING, initial=0))
        if high >= self.vocab_size or low < 0:
            row, column = np.argwhere((rows >= self.vocab_size) | ((rows < 0) & (rows != PADDING)))[0]
            raise ConfigError(
                f"sample {indices[row]} holds token {rows[row, column]}, outside model.vocab_size={self.vocab_size}; "
                f"set model.vocab_size to the tokenizer's size, or look at the dataset"
            )
        return padded

    def _place(self, batch: Batch) -> Batch:
        return _each(batch, lambda x: x.to(self.device, non_blocking=True))


def _each(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with every tensor that is there changed."""
    changed: list[Any] = [None if x is None else change(x) for x in batch]
    return Batch(*changed)


def _restarted(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, T] document numbers -> positions that begin at 0 in each document."""
    where = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    starts = np.diff(documents, axis=1, prepend=-1) != 0
    return where - np.maximum.accumulate(np.where(starts, where, 0), axis=1)
