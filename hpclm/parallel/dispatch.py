"""Tokens on their way to the experts that compute them, and back.

n tokens on this process, k experts for each, E experts, of which each of ``axis``'s R processes has E / R consecutive ones. A token becomes
k rows, which are sorted by expert, sent to the processes that have these experts, and sorted there. All moves are permutations, whose
gradients are the inverse permutations: no sum is made in an order that depends on the device.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpclm.parallel.collectives import exchange_rows
from hpclm.parallel.mesh import Axis

KEYS = torch.int16
"""Type of experts' numbers while they are sorted: GPUs go over all of them once for each byte."""


@dataclass(frozen=True)
class Arrived:
    """Rows on the process that has their experts, sorted by expert, and how they go back."""

    rows: Tensor
    """[m, C]; without other processes m is n k."""
    counts: Tensor
    """[E / R] int64: rows of each expert of this process."""
    order: Tensor
    """[n k]: of each row of this process, sorted by expert, its place among the k rows of each token in turn."""
    sizes: tuple[list[int], list[int]] | None = None
    """Rows sent to each process, and received from it; None without other processes."""
    arrival: Tensor | None = None
    """[m]: of each of ``rows``, its place among the received ones."""


def send(x: Tensor, chosen: Tensor, experts: int, axis: Axis) -> Arrived:
    """[n, C] tokens and the [n, k] experts chosen for each -> their rows on the processes that have these experts.

    With several processes the host waits for the device, once: it must know how many rows it sends and receives.
    """
    order = chosen.flatten().to(KEYS).argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
    rows = _Sorted.apply(x, order, chosen.shape[1])
    if axis.size == 1:
        return Arrived(rows, counts, order)
    given = torch.empty_like(counts)
    dist.all_to_all_single(given, counts, group=axis.group)
    # [2, R] in one copy to the host
    sent, received = on_host(torch.stack([counts, given]).view(2, axis.size, -1).sum(2), len(rows))
    rows = exchange_rows(rows, sent, received, axis)
    # of one process after the other, each sorted by expert
    expert = torch.arange(len(given), device=x.device) % (experts // axis.size)
    arrival = expert.to(KEYS).repeat_interleave(given, output_size=sum(received)).argsort(stable=True)
    of_expert = given.view(axis.size, -1).sum(0)
    return Arrived(_Moved.apply(rows, arrival), of_expert, order, (sent, received), arrival)


def on_host(counts: Tensor, rows: int) -> Any:
    """``counts`` as numbers, for which the host waits. Where all processes and experts have as many, the last dimension adds up to ``rows``;
    a simulation, which has no numbers, takes that to be so."""
    return counts.tolist()


def give_back(y: Tensor, arrived: Arrived, axis: Axis) -> Tensor:
    """[m, C] what experts made of ``arrived.rows`` -> [n k, C], the k results of each token in turn."""
    if arrived.sizes is not None and arrived.arrival is not None:
        sent, received = arrived.sizes
        y = exchange_rows(_Moved.apply(y, inverse(arrived.arrival)), received, sent, axis)
    return _Moved.apply(y, inverse(arrived.order))


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation [n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Sorted(torch.autograd.Function):
    """Row i is token order[i] // k; the gradient of a token is the sum of its k rows'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        [order] = ctx.saved_tensors
        return outer[0].index_select(0, inverse(order)).unflatten(0, (-1, ctx.k)).sum(1), None, None


class _Moved(torch.autograd.Function):
    """Row i is row order[i]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        [order] = ctx.saved_tensors
        return outer[0].index_select(0, inverse(order)), None
