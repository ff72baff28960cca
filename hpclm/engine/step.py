"""What one step is made of: seeds, the share of each token in the loss, micro-batches, and the norm of the gradients."""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpclm.data.batches import Batch
from hpclm.engine.held import Held
from hpclm.model.seeds import mix
from hpclm.parallel.collectives import all_reduce
from hpclm.parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class Replica:
    """A model as one of the data-parallel replicas trains it."""

    forward: Callable[..., Any]
    """Stack's forward. After the backward pass of the last micro-batch, gradients are those of all replicas."""
    held: tuple[Held, ...]
    """The weights that the optimizer moves."""
    hold: Callable[[], AbstractContextManager] = nullcontext
    """Inside it, micro-batches only add to this replica's own gradients."""
    mean: bool = False
    """Whether gradients are the mean over the replicas; otherwise they are the sum."""
    sharded: bool = False
    """Whether each replica holds parts of the weights."""
    pipeline: "Callable[[Work, float], Tensor] | None" = None
    """Runs all micro-batches instead of ``forward``, as accumulate() does; for pipelines."""
    finish: Callable[[], None] = lambda: None
    """Called after the backward pass: puts the gradients where the held parameters have them."""
    rest: Callable[[], None] = lambda: None
    """Called after an evaluation: gives back what forward passes without a backward pass left behind."""
    backward: Callable[[Tensor], Any] = Tensor.backward
    """Runs the backward pass of a loss."""


@dataclass(frozen=True)
class Work:
    """A step's micro-batches of one replica, and what goes with each."""

    batches: Sequence[Batch]
    weights: Sequence[Tensor]
    """[B, T] fp32 that make the weighted losses of all replicas sum to the mean."""
    seeds: Sequence[int | None]
    """Of what is random in each."""
    between: Callable[[int], None]
    """As of Engine.train_step."""


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed what a block of a user's own may use outside PyTorch, and what no layer seeds, from seed, step and rank."""
    words = np.random.SeedSequence([seed, step, *([rank] if rank else [])]).generate_state(2, np.uint64)
    torch.manual_seed(int(words[0] >> 1))
    random.seed(int(words[1]))
    np.random.seed(int(words[1]) % 2**32)


def seeds(seed: int, step: int, count: int, dp: Axis) -> list[int]:
    """The seed of each of this replica's ``count`` micro-batches, the same however many replicas share them."""
    return [mix(seed, step, number * dp.size + dp.rank) for number in range(count)]


def token_weights(batches: Sequence[Batch], loss_norm: str, dp: Axis) -> list[Tensor]:
    """For each micro-batch, [B, T] fp32 weights that make the weighted losses of all, of all replicas, sum to the mean."""
    masks = [
        torch.ones_like(batch.labels, dtype=torch.float32) if batch.loss_mask is None else batch.loss_mask.float()
        for batch in batches
    ]
    if loss_norm == "microbatch":
        return [mask / (mask.sum().clamp(min=1) * len(masks) * dp.size) for mask in masks]
    total = all_reduce(torch.stack([mask.sum() for mask in masks]).sum(), dp).clamp(min=1)
    return [mask / total for mask in masks]


@torch.no_grad()
def mean_loss(forward: Callable[..., Tensor], batches: Iterable[Batch], device: torch.device, world: Axis) -> float:
    """Mean loss per token that counts, in nats, over the micro-batches of all replicas; one is held at a time.

    ``forward`` is Stack's. All processes of a replica count the same tokens, so their shares in the sums are equal.
    """
    found = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        mask = torch.ones_like(batch.labels) if batch.loss_mask is None else batch.loss_mask
        value = forward(batch.tokens, batch.positions, batch.documents, batch.labels, mask.float())
        found += torch.stack([value.double(), mask.sum().double()])
    total, counted = all_reduce(found, world)
    return (total / counted.clamp(min=1)).item()


def accumulate(replica: Replica, work: Work, factor: float = 1.0) -> Tensor:
    """Run this replica's micro-batches and sum their weighted losses; gradients are those of the loss times ``factor``."""
    if replica.pipeline:
        total = replica.pipeline(work, factor)
        replica.finish()
        return total
    total = torch.zeros((), device=work.batches[0].tokens.device)
    last = len(work.batches) - 1
    for number, (batch, weight, seed) in enumerate(zip(work.batches, work.weights, work.seeds, strict=True)):
        if number:
            work.between(number)
        with replica.hold() if number < last else nullcontext():
            tokens, labels, _, positions, documents = batch
            value = replica.forward(tokens, positions, documents, labels, weight * factor, seed)
            replica.backward(value)
        total += value.detach() / factor
    replica.finish()
    return total


def gradient_norm(all_held: Iterable[Held], mesh: Mesh, sharded: bool) -> Tensor:
    """L2 norm over all gradients of the model as one vector, in fp32; each weight counts once, wherever it lies."""
    counted = [
        held.parameter.grad
        for held in all_held
        if held.parameter.grad is not None and not held.copy and (held.form.dim is not None or mesh.tp.first)
    ]
    norm = torch.nn.utils.get_total_norm(counted)
    if mesh.model.size == 1 and not sharded:
        return norm
    device = next(held.parameter.device for held in all_held)
    square = all_reduce(norm.to(device, torch.float32).square(), mesh.model)
    return (all_reduce(square, mesh.dp) if sharded else square).sqrt()
