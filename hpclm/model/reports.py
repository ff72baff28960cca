"""What a block reports: named scalars, and auxiliary losses, which are part of what training minimises.

Both are means over the tokens of a step, weighted as the loss is, and so the same in every layout of processes: a block gives a value for
each token that it has, and needs to know no engine, stage or rank.
"""

from typing import Any

import torch
from torch import Tensor

from hpclm.errors import ConfigError
from hpclm.model.attention.layout import AttentionMetadata
from hpclm.rundir.metric_names import is_reserved


def report(metadata: AttentionMetadata, name: str, values: Tensor, by_layer: bool = False) -> None:
    """Report the mean of ``values`` under ``name``: [t, B], one for each token that the block has, or a single value, which counts for all
    of these tokens, such as the mean of a gate.

    The mean is over the tokens of the step, on all processes, weighted as the loss is. What several layers report under one name is added
    up; ``by_layer``: each has a separate name, ``name/block3``. Outside of training nothing is reported. ConfigError for another shape,
    and for a name that hpclm's own metrics have.
    """
    if metadata.reports is not None and metadata.weights is not None:
        check_name(name)
        if values.ndim == 0:
            values = values.expand(metadata.weights.shape)
        if values.shape != metadata.weights.shape:
            wanted, given = list(metadata.weights.shape), list(values.shape)
            raise ConfigError(
                f"report({name!r}): values of shape {given}; it takes one for each token, {wanted}, or a single one"
            )
        key = f"{name}/" if by_layer else name
        total = (values.detach().float() * metadata.weights).sum()
        values_of_layer = metadata.reports.values
        values_of_layer[key] = values_of_layer[key] + total if key in values_of_layer else total


def check_name(name: str) -> None:
    """ConfigError for a name that hpclm's own metrics have."""
    if is_reserved(name):
        raise ConfigError(f"report({name!r}): metrics.jsonl has another number under this name; choose another one")


def add_loss(metadata: AttentionMetadata, x: Tensor, name: str, values: Tensor, coefficient: float) -> Tensor:
    """``x``, whose backward pass adds the gradient of ``coefficient`` x the mean of ``values`` [t, B]; the block goes on with it.

    The mean without the coefficient is reported under ``name``, and is no part of the loss that is logged. ``x`` is any activation on
    the way to the block's result, which must have a gradient.
    """
    report(metadata, name, values)
    if metadata.weights is None or not torch.is_grad_enabled():
        return x
    return _WithLoss.apply(x, coefficient * (values.float() * metadata.weights).sum())


class _WithLoss(torch.autograd.Function):
    """Its first input; in the backward pass the second, a loss, has a gradient of 1, as the loss at the end of the model has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        """Both gradients."""
        [gradient] = outer
        return gradient, torch.ones((), device=gradient.device)
