"""Samples to micro-batches: which samples a step reads is a function of the samples consumed before it, and nothing else.

B sequences in a micro-batch, T tokens in a sequence.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpclm.config import DataConfig, Plan
from hpclm.data.sources import Samples
from hpclm.errors import ConfigError


class Batch(NamedTuple):
    """One micro-batch on the device."""

    tokens: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64: the token after each
    loss_mask: Tensor | None  # [B, T] bool: what counts in the loss; None: everything
    positions: Tensor | None  # [B, T] int64, where they restart inside the sample
    documents: Tensor | None  # [B, T] int64, number of the document, where attention stays inside it


class Batches:
    """The micro-batches of any step of one replica."""

    def __init__(
        self, samples: Samples, plan: Plan, data: DataConfig, vocab_size: int, eod: int | None, device: torch.device
    ):
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
        self.samples, self.plan, self.data, self.device = samples, plan, data, device
        self.vocab_size, self.eod = vocab_size, eod

    def step(self, consumed: int) -> list[Batch]:
        """The micro-batches of the step that begins when ``consumed`` samples have been read."""
        return self.take(consumed, self.plan.batch_size(consumed))

    def take(self, start: int, count: int) -> list[Batch]:
        """Samples ``start`` to ``start + count``, in micro-batches; past the end the samples begin anew."""
        size = self.plan.micro_size
        return [
            self._batch(range(begin, min(begin + size, start + count))) for begin in range(start, start + count, size)
        ]

    def _batch(self, indices: range) -> Batch:
        rows = np.stack([self.samples[i % len(self.samples)] for i in indices]).astype(np.int64)  # [B, T + 1]
        if rows.max() >= self.vocab_size or rows.min() < 0:
            row, column = np.argwhere((rows >= self.vocab_size) | (rows < 0))[0]
            raise ConfigError(
                f"sample {indices[row]} holds token {rows[row, column]}, outside model.vocab_size={self.vocab_size}; "
                f"set model.vocab_size to the tokenizer's size, or look at the dataset"
            )
        tokens = rows[:, :-1]
        mask = positions = documents = None
        if self.data.eod_mask_loss:
            mask = tokens != self.eod
        if self.data.reset_attention_mask or self.data.reset_position_ids:
            number = np.cumsum(tokens == self.eod, 1) - (tokens == self.eod)  # an end-of-document token ends its own
            documents = number if self.data.reset_attention_mask else None
            positions = _restarted(number) if self.data.reset_position_ids else None
        tensors = [None if x is None else self._place(x) for x in (mask, positions, documents)]
        return Batch(self._place(tokens), self._place(rows[:, 1:]), *tensors)

    def _place(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def _restarted(documents: np.ndarray) -> np.ndarray:
    """[B, T] document numbers -> positions that begin at 0 in each document."""
    where = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    starts = np.diff(documents, axis=1, prepend=-1) != 0
    return where - np.maximum.accumulate(np.where(starts, where, 0), axis=1)
