"""Reports of a block: named scalars, and auxiliary losses, which training minimises too.

Both are means over the tokens of a step, weighted like the loss, and so the same in every layout of processes. A block passes one
value for each of its tokens, and need not know about engines, stages or ranks.
"""

from typing import Any

import torch
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.base.metric_names import is_reserved
from hpclm.model.context import LayerContext
from hpclm.parallel.micro_batch import add


def report(context: LayerContext, name: str, values: Tensor, by_layer: bool = False) -> None:
    """Report the mean of ``values`` under ``name``. ``values``: [t, B], one for each of the block's tokens, or a single value for all
    tokens, such as the mean of a gate.

    The mean is over the tokens of the step, on all processes, weighted like the loss. Reports of several layers under one name are
    summed; with ``by_layer`` each gets its own name, ``name/block3``. Reports outside training are ignored. ConfigError for another
    shape, and for the name of one of hpclm's metrics.
    """
    if context.reports is not None and context.weights is not None:
        check_name(name)
        if values.ndim == 0:
            values = values.expand(context.weights.shape)
        if values.shape != context.weights.shape:
            raise ConfigError(
                f"report({name!r}): values of shape {list(values.shape)}; pass one value for each token, "
                f"{list(context.weights.shape)}, or a single value"
            )
        key = f"{name}/" if by_layer else name
        total = (values.detach().float() * context.weights).sum()
        add(context.reports.values, {key: total})


def check_name(name: str) -> None:
    """ConfigError for the name of one of hpclm's metrics."""
    if is_reserved(name):
        raise ConfigError(
            f"report({name!r}): metrics.jsonl already uses this name for another number; choose another one"
        )


def add_loss(context: LayerContext, x: Tensor, name: str, values: Tensor, coefficient: float) -> Tensor:
    """``x``, whose backward pass adds the gradient of ``coefficient`` x the mean of ``values`` [t, B]. The block must use the returned
    tensor.

    The mean without the coefficient is reported under ``name``, and does not enter the logged loss. ``x`` is any activation on the path
    to the block's result; it must have a gradient.
    """
    report(context, name, values)
    if context.weights is None or not torch.is_grad_enabled():
        return x
    return _WithLoss.apply(x, coefficient * (values.float() * context.weights).sum())


class _WithLoss(torch.autograd.Function):
    """Returns its first input; in the backward pass the second input, a loss, gets a gradient of 1, like the model's loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        [gradient] = outer
        return gradient, torch.ones((), device=gradient.device)
