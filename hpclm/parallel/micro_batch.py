"""One micro-batch on its way from the data to the loss, and what comes out of the layers.

B sequences in a micro-batch, T tokens in a sequence, of which this process has T / cp with context parallelism.
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
    """What a model computes with, on its device.

    Not a tuple: libraries that look for tensors in the arguments of a module, to cast them, leave it alone.
    """

    tokens: Tensor
    """[B, T / cp] int64; this and labels may be views of one tensor, and not contiguous."""
    labels: Tensor | None = None
    """[B, T / cp] int64: the token after each; None: the output projection's input is wanted, not a loss."""
    loss_mask: Tensor | None = None
    """[B, T / cp] bool: tokens that count in the loss; None: all."""
    positions: Tensor | None = None
    """[B, T / cp] int64, if positions restart inside the sample."""
    documents: Tensor | None = None
    """[B, T] int64 document indices, if attention must not cross documents."""
    weights: Tensor | None = None
    """[B, T / cp] fp32: the factor of each token in the loss. They include the mask, 1 / tokens of the step, and the loss scale, so that
    gradients are right without another factor."""
    seed: int | None = None
    """Of dropout; None: there is none."""

    def part(self, axis: Axis) -> "MicroBatch":
        """What one process of ``axis`` computes with, if they share out each sequence."""
        if axis.size == 1:
            return self
        given = self.tokens, self.labels, self.loss_mask, self.positions, self.weights
        # documents stay whole: the queries of this part attend to keys of the whole sequence
        tokens, labels, loss_mask, positions, weights = (None if x is None else take(x, axis) for x in given)
        assert tokens is not None
        return MicroBatch(tokens, labels, loss_mask, positions, self.documents, weights, self.seed)

    def mask(self) -> Tensor:
        """[B, T / cp] fp32: 1 for tokens that count in the loss, else 0."""
        # contiguous, whatever the strides of the data: replicas that compile for other strides would wait for each other
        if self.loss_mask is None:
            return torch.ones(self.tokens.shape, dtype=torch.float32, device=self.tokens.device)
        # fp32 in every precision, because the mask is summed: bf16 counts exactly only up to 256
        return self.loss_mask.to(torch.float32, memory_format=torch.contiguous_format)

    def weighted(self, weights: Tensor, seed: int | None = None) -> "MicroBatch":
        """With these token weights and this seed."""
        return replace(self, weights=weights, seed=seed)


class Output(NamedTuple):
    """What a model, or a pipeline's stage of it, makes of a micro-batch. A tuple: libraries look for tensors in it."""

    value: Any
    """The weighted sum of the losses, a scalar in fp32; without labels and weights the Head; of a stage before the last [t, B, C]."""
    scalars: dict[str, Tensor]
    """What layers and loss report: of each name the weighted sum over this process's tokens, in fp32, without a gradient."""


def add(scalars: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add ``more`` to ``scalars``, name by name."""
    for name, value in more.items():
        scalars[name] = scalars[name] + value if name in scalars else value
