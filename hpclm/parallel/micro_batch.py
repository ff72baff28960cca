"""One micro-batch on its way from the data to the loss, and the output of the layers.

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

    Not a tuple: libraries that cast the tensors among a module's arguments leave it alone.
    """

    tokens: Tensor
    """[B, T / cp] int64; this and labels may be views of one tensor, and not contiguous."""
    labels: Tensor | None = None
    """[B, T / cp] int64: the token after each; None: return the output projection's input instead of a loss."""
    loss_mask: Tensor | None = None
    """[B, T / cp] bool: tokens that count in the loss; None: all."""
    positions: Tensor | None = None
    """[B, T / cp] int64, if positions restart inside the sample."""
    documents: Tensor | None = None
    """[B, T] int64 document indices, if attention must not cross documents."""
    weights: Tensor | None = None
    """[B, T / cp] fp32: factor of each token in the loss. Includes the mask, 1 / tokens of the step, and the loss scale, so that
    gradients need no further factor."""
    seed: int | None = None
    """Dropout seed; None without dropout."""

    def part(self, axis: Axis) -> "MicroBatch":
        """The part of one process of ``axis``; its processes divide each sequence."""
        if axis.size == 1:
            return self
        given = self.tokens, self.labels, self.loss_mask, self.positions, self.weights
        # documents stay whole: the queries of this part attend to keys of the whole sequence
        tokens, labels, loss_mask, positions, weights = (None if x is None else take(x, axis) for x in given)
        assert tokens is not None
        return MicroBatch(tokens, labels, loss_mask, positions, self.documents, weights, self.seed)

    def mask(self) -> Tensor:
        """[B, T / cp] fp32: 1 for tokens that count in the loss, else 0."""
        # contiguous, whatever the strides of the data: replicas that compile for different strides would wait for
        # each other
        if self.loss_mask is None:
            return torch.ones(self.tokens.shape, dtype=torch.float32, device=self.tokens.device)
        # fp32 in every precision, because the mask is summed: bf16 counts exactly only up to 256
        return self.loss_mask.to(torch.float32, memory_format=torch.contiguous_format)

    def weighted(self, weights: Tensor, seed: int | None = None) -> "MicroBatch":
        """A copy with these token weights and this seed."""
        return replace(self, weights=weights, seed=seed)


class Output(NamedTuple):
    """The output of a model or pipeline stage for a micro-batch. A tuple: libraries look for tensors in it."""

    value: Any
    """The weighted sum of the losses, a scalar in fp32; without labels and weights, the Head; of a stage before the last, [t, B, C]."""
    scalars: dict[str, Tensor]
    """The reports of layers and loss: for each name the weighted sum over this process's tokens, in fp32, without a gradient."""


def add(scalars: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add ``more`` to ``scalars``, name by name."""
    for name, value in more.items():
        scalars[name] = scalars[name] + value if name in scalars else value
