"""Micro-batch accumulation, shared by engines that run their own backward pass."""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpclm.cluster.team import Team
from hpclm.data.batches import Batch
from hpclm.model.loss import TokenLoss


@dataclass(frozen=True)
class Replica:
    """A model as one of the data-parallel replicas runs it."""

    forward: Callable[..., Any]
    """After the backward pass of what it gives, gradients are sums over the replicas."""
    hold: Callable[[], AbstractContextManager]
    """Inside it, micro-batches only add to this replica's own gradients."""

    @classmethod
    def alone(cls, model: nn.Module) -> "Replica":
        """The only one."""
        return cls(model, nullcontext)

    @classmethod
    def among_others(cls, model: nn.Module, device: torch.device) -> "Replica":
        """One of the default process group's, which all start from rank 0's weights."""
        devices = [device.index] if device.type == "cuda" else None
        wrapped = nn.parallel.DistributedDataParallel(model, devices, gradient_as_bucket_view=True)
        wrapped.register_comm_hook(None, summed)
        return cls(wrapped, wrapped.no_sync)


def summed(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Sum a bucket of gradients over the replicas, where DistributedDataParallel would take the mean."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Make everything random in a step (dropout) follow from seed, step and rank, so that nothing needs saving."""
    words = np.random.SeedSequence([seed, step, *([rank] if rank else [])]).generate_state(2, np.uint64)
    torch.manual_seed(int(words[0] >> 1))
    random.seed(int(words[1]))
    np.random.seed(int(words[1]) % 2**32)  # for blocks of a user's own


def token_weights(batches: Sequence[Batch], loss_norm: str, team: Team) -> list[Tensor]:
    """For each micro-batch, [B, T] fp32 weights that make the weighted losses of all, of all replicas, sum to the mean."""
    masks = [
        torch.ones_like(batch.labels, dtype=torch.float32) if batch.loss_mask is None else batch.loss_mask.float()
        for batch in batches
    ]
    if loss_norm == "microbatch":
        return [mask / (mask.sum().clamp(min=1) * len(masks) * team.size) for mask in masks]
    total = team.total(torch.stack([mask.sum() for mask in masks]).sum()).clamp(min=1)
    return [mask / total for mask in masks]


@torch.no_grad()
def mean_loss(model: nn.Module, loss: TokenLoss, batches: Iterable[Batch], team: Team | None = None) -> float:
    """Mean loss per token that counts, in nats, over the micro-batches of the whole team; one is held at a time."""
    total = counted = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for batch in batches:
        mask = torch.ones_like(batch.labels) if batch.loss_mask is None else batch.loss_mask
        value = loss(model(batch.tokens, batch.positions, batch.documents), batch.labels, mask.float())
        total, counted = total + value.double(), counted + mask.sum()
    if team:
        total, counted = team.total(torch.stack([total, counted]))
    return (total / counted.clamp(min=1)).item()


def accumulate(
    replica: Replica,
    loss: TokenLoss,
    batches: Sequence[Batch],
    weights: Sequence[Tensor],
    scale: float = 1.0,
) -> Tensor:
    """Run this replica's micro-batches and sum their weighted losses; gradients are those of the loss times ``scale``."""
    total = torch.zeros((), device=batches[0].tokens.device)
    for number, (batch, weight) in enumerate(zip(batches, weights, strict=True), start=1):
        with replica.hold() if number < len(batches) else nullcontext():
            hidden = replica.forward(batch.tokens, batch.positions, batch.documents)
            value = loss(hidden, batch.labels, weight * scale)
            value.backward()
        total += value.detach() / scale
    return total
