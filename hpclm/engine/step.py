"""Micro-batch accumulation, shared by engines that run their own backward pass."""

import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hpclm.data.batches import Batch
from hpclm.model.loss import TokenLoss


def seed_step(seed: int, step: int) -> None:
    """Make everything random in a step (dropout) a function of the seed and the step, so that nothing needs saving."""
    words = np.random.SeedSequence([seed, step]).generate_state(2, np.uint64)
    torch.manual_seed(int(words[0] >> 1))
    random.seed(int(words[1]))
    np.random.seed(int(words[1]) % 2**32)  # for blocks of a user's own


def token_weights(batches: Sequence[Batch], loss_norm: str) -> list[Tensor]:
    """For each micro-batch, [B, T] fp32 weights that make the weighted losses of all of them sum to the step's mean."""
    masks = [
        torch.ones_like(batch.labels, dtype=torch.float32) if batch.loss_mask is None else batch.loss_mask.float()
        for batch in batches
    ]
    if loss_norm == "microbatch":
        return [mask / (mask.sum().clamp(min=1) * len(masks)) for mask in masks]
    total = torch.stack([mask.sum() for mask in masks]).sum().clamp(min=1)
    return [mask / total for mask in masks]


@torch.no_grad()
def mean_loss(model: nn.Module, loss: TokenLoss, batches: Iterable[Batch]) -> float:
    """Mean loss per token that counts, in nats, over all micro-batches; one is held at a time."""
    total = counted = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        mask = torch.ones_like(batch.labels) if batch.loss_mask is None else batch.loss_mask
        value = loss(model(batch.tokens, batch.positions, batch.documents), batch.labels, mask.float())
        total, counted = total.to(value.device) + value.double(), counted.to(value.device) + mask.sum()
    return (total / counted.clamp(min=1)).item()


def accumulate(
    model: nn.Module,
    loss: TokenLoss,
    batches: Sequence[Batch],
    weights: Sequence[Tensor],
    backward: Callable[[Tensor], None],
    scale: float = 1.0,
) -> Tensor:
    """Run the micro-batches and sum their weighted losses; ``backward`` gets each loss times ``scale``."""
    total = torch.zeros((), device=batches[0].tokens.device)
    for batch, weight in zip(batches, weights, strict=True):
        value = loss(model(batch.tokens, batch.positions, batch.documents), batch.labels, weight * scale)
        backward(value)
        total += value.detach() / scale
    return total
