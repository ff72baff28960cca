"""A micro-batch, the input of a model, and the output of the model or of a pipeline stage.

B sequences in a micro-batch, T tokens in a sequence; with context parallelism this process has T / cp of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpclm.parallel.mesh import Axis
from hpclm.parallel.sequence import take


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of a model, on its device.

    Not a tuple: libraries cast the tensors in tuples among a module's arguments, but leave this alone.
    """

    tokens: Tensor
    """[B, T / cp] int64; ``tokens`` and ``labels`` may be non-contiguous views of one tensor."""
    labels: Tensor | None = None
    """[B, T / cp] int64: the next token of each; None: the model returns the output projection's input instead of a loss."""
    loss_mask: Tensor | None = None
    """[B, T / cp] bool: tokens that count in the loss; None: all."""
    positions: Tensor | None = None
    """[B, T / cp] int64, if positions restart inside the sample."""
    documents: Tensor | None = None
    """[B, T] int64 document indices, if attention must not cross documents."""
    weights: Tensor | None = None
    """[B, T / cp] fp32: each token's factor in the loss: the mask, 1 / the step's tokens, and the loss scale."""
    seed: int | None = None
    """Dropout seed; None without dropout."""

    def part(self, axis: Axis) -> "MicroBatch":
        """This process's part; the processes of ``axis`` divide each sequence."""
        if axis.size == 1:
            return self
        given = self.tokens, self.labels, self.loss_mask, self.positions, self.weights
        # documents stay whole: the queries of this part attend to keys of the whole sequence
        tokens, labels, loss_mask, positions, weights = (None if x is None else take(x, axis) for x in given)
        assert tokens is not None
        return MicroBatch(tokens, labels, loss_mask, positions, self.documents, weights, self.seed)

    def mask(self) -> Tensor:
        """[B, T / cp] fp32: 1 for tokens that count in the loss, else 0."""
        # always contiguous: replicas that compiled for different strides would wait for each other
        if self.loss_mask is None:
            return torch.ones(self.tokens.shape, dtype=torch.float32, device=self.tokens.device)
        # fp32 in every precision, because the mask is summed: bf16 counts exactly only up to 256
        return self.loss_mask.to(torch.float32, memory_format=torch.contiguous_format)

    def weighted(self, weights: Tensor, seed: int | None = None) -> "MicroBatch":
        """A copy with these token weights and this seed."""
        return replace(self, weights=weights, seed=seed)


class ModelOutput(NamedTuple):
    """The output of a model or pipeline stage for a micro-batch. A tuple, because libraries look for tensors in it."""

    value: Any
    """The weighted sum of the losses, an fp32 scalar; without labels and weights, the Head; before the last stage, [t, B, C]."""
    scalars: dict[str, Tensor]
    """Reports of layers and loss: the weighted sum over this process's tokens, by name, in fp32 without gradient."""


def add(scalars: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add ``more`` to ``scalars``, name by name."""
    for name, value in more.items():
        if name in scalars:
            value = scalars[name] + value
        scalars[name] = value
