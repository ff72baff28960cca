"""The output of a model, and how it becomes logits.

t tokens of each sequence on this process, B sequences in a micro-batch, C hidden size, V padded vocabulary size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpclm.model.context import LayerContext
from hpclm.model.layers import VocabParallelEmbedding
from hpclm.parallel.mesh import SINGLE, Axis


class LogitShape(NamedTuple):
    """How the product of hidden states and output projection becomes logits."""

    multiplier: float = 1.0
    cap: float | None = None
    fp32: bool = False

    def product(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """[..., C] hidden and [V, C] rows -> [..., V]."""
        return F.linear(hidden.float(), rows.float()) if self.fp32 else F.linear(hidden, rows)

    def of(self, product: Tensor) -> Tensor:
        """The logits for a product."""
        logits = product if self.multiplier == 1.0 else product * self.multiplier
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def backward(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """The gradient of the product, given that of its ``logits``, which are only needed with a cap."""
        if self.cap is not None and logits is not None:
            gradient = gradient * (1 - (logits / self.cap).square())
        return gradient if self.multiplier == 1.0 else gradient * self.multiplier


class Head(NamedTuple):
    """The output of the model: the final activations, and the weight that projects them to logits."""

    hidden: Tensor  # [t, B, C]
    weight: Tensor  # [V / tp, C], fp32, or in the compute type with main_grad
    vocab_size: int  # the remaining rows are padding
    tp: Axis = SINGLE
    cast: Tensor | None = None  # the weight in the compute type, if it has been cast already
    main_grad: Tensor | None = None  # receives the weight's gradient in place, if the backward pass does that
    shape: LogitShape = LogitShape()

    def rows(self) -> Tensor:
        """[V / tp, C] in the compute type; gradients belong to ``weight``."""
        return self.weight.to(self.hidden.dtype) if self.cast is None else self.cast

    def logits(self) -> Tensor:
        """[B, T, vocabulary] logits in the compute type; without tensor parallelism."""
        return self.shape.of(self.shape.product(self.hidden, self.rows()[: self.vocab_size])).transpose(0, 1)


def output(table: nn.Module, x: Tensor, _: LayerContext, shape: LogitShape) -> Head:
    """The head of an untied model."""
    assert isinstance(table, VocabParallelEmbedding)
    return Head(x, table.weight, table.vocab_size, table.tp, table.rows, table.main_grads.get("weight"), shape)


def tied_output(table: nn.Module, x: Tensor, context: LayerContext, shape: LogitShape) -> Head:
    """The head of a tied model, whose ``table`` is the token embedding."""
    head = output(table, x, context, shape)  # a gradient accumulated in place is completed by the input embedding
    return head if head.main_grad is None else head._replace(weight=head.weight.detach())
