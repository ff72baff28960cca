"""Moves tokens to the experts that compute them, and back.

n tokens on this process, k experts for each, E experts; each of ``axis``'s R processes has E / R consecutive ones. A token becomes k
rows, which are sorted by expert, sent to the processes with these experts, and sorted there. All moves are permutations, whose gradients
are the inverse permutations, so no sum depends on the order in which the device computes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpclm.parallel.collectives import exchange_rows
from hpclm.parallel.mesh import Axis

KEYS = torch.int16
"""Type of expert numbers in sorts: a GPU passes over all of them once for each byte."""


@dataclass(frozen=True)
class Route:
    """The route of a micro-batch's tokens to their experts, and of the results back."""

    axis: Axis
    order: Tensor
    """[n k]: the permutation that sorts this process's rows by expert; before it, row k i + j is token i's j-th expert."""
    tokens: Tensor
    """[n k]: the token of each row, sorted by expert."""
    places: Tensor
    """[n, k]: positions of each token's rows after sorting."""
    counts: Tensor
    """[E / R] int64: rows of each expert of this process."""
    sizes: tuple[list[int], list[int]] | None = None
    """Rows sent to each process, and received from it; None with a single process."""
    arrival: tuple[Tensor, Tensor] | None = None
    """[m]: the permutation that sorts received rows by this process's experts, and its inverse; None with a single process."""

    def send(self, x: Tensor) -> Tensor:
        """[n, C] tokens -> [m, C] rows for the experts of this process, sorted by expert."""
        return self._exchange(_Spread.apply(x, self.tokens, self.places))

    def send_factors(self, factors: Tensor) -> Tensor:
        """[n, k] factors, one for each expert of a token -> [m], one for each row that send() returns."""
        return self._exchange(_Moved.apply(factors.flatten(), self.order, self.places.flatten()))

    def give_back(self, y: Tensor) -> Tensor:
        """[m, C] results of the rows -> [n, C]: the sum of each token's k results."""
        if self.sizes is not None and self.arrival is not None:
            (sent, received), (order, back) = self.sizes, self.arrival
            y = exchange_rows(_Moved.apply(y, back, order), received, sent, self.axis)
        return _Summed.apply(y, self.tokens, self.places)

    def _exchange(self, rows: Tensor) -> Tensor:
        if self.sizes is None or self.arrival is None:
            return rows
        return _Moved.apply(exchange_rows(rows, *self.sizes, self.axis), *self.arrival)


def route(chosen: Tensor, experts: int, axis: Axis) -> Route:
    """[n, k] chosen experts of each token -> the route of the tokens.

    With several processes the host waits once for the device: it must know how many rows it sends and receives.
    """
    order = chosen.flatten().to(KEYS).argsort(stable=True)
    tokens = order // chosen.shape[1]
    places = inverse(order).view_as(chosen)
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    counts = counts.scatter_add(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
    if axis.size == 1:
        return Route(axis, order, tokens, places, counts)
    given = torch.empty_like(counts)
    dist.all_to_all_single(given, counts, group=axis.group)
    # [2, R] in one copy to the host
    sent, received = on_host(torch.stack([counts, given]).view(2, axis.size, -1).sum(2), len(order))
    # rows arrive process by process, each process's sorted by expert
    expert = torch.arange(len(given), device=chosen.device) % (experts // axis.size)
    by_expert = expert.to(KEYS).repeat_interleave(given, output_size=sum(received)).argsort(stable=True)
    of_expert = given.view(axis.size, -1).sum(0)
    return Route(axis, order, tokens, places, of_expert, (sent, received), (by_expert, inverse(by_expert)))


def on_host(counts: Tensor, rows: int) -> Any:
    """``counts`` as numbers on the host, which waits for them. A simulation, which has no numbers, assumes an even spread: the last
    dimension sums to ``rows``."""
    return counts.tolist()


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation [n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _spread(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """[n, C] -> [n k, C]: row i is the row of token ``tokens[i]``."""
    return x.index_select(0, tokens)


def _summed(rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """[n k, C] -> [n, C]: row i is the sum of the rows at ``places[i]``, in this order."""
    return rows.index_select(0, places.flatten()).unflatten(0, places.shape).sum(1)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, places)
        return _spread(x, tokens, places)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return _summed(outer[0], *ctx.saved_tensors), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, places)
        return _summed(rows, tokens, places)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return _spread(outer[0], *ctx.saved_tensors), None, None


class _Moved(torch.autograd.Function):
    """Row i of the output is row ``order[i]`` of the input; ``back``: the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        [back] = ctx.saved_tensors
        return outer[0].index_select(0, back), None, None
