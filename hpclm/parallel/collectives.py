"""The collectives that a split model needs, each with its transpose as gradient.

Activations are [sequence, batch, hidden]. Between layers every tensor-parallel process holds one slice of the sequence;
inside attention and MLP it holds the whole sequence and a slice of the weights (Korthikanti et al. 2022). ``gather``
enters such a region and ``scatter`` leaves it. With one process all are free.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpclm.parallel.mesh import Axis

# torch 2.13 has new names for these two and warns of the old ones
gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Op = Callable[[Tensor, Axis], Tensor]


def start_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Any]:
    """Begin to gather [t, ...] slices: the [T, ...] tensor they will be in, and the work to wait for."""
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    return out, gather_into(out, x.contiguous(), group=axis.group, async_op=True)


def start_scatter(x: Tensor, axis: Axis) -> tuple[Tensor, Any]:
    """Begin to sum [T, ...] tensors: the [t, ...] slice of the total, and the work to wait for."""
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    return out, scatter_into(out, x.contiguous(), group=axis.group, async_op=True)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[t, ...] slices -> [T, ...] on every process; no gradient."""
    if axis.size == 1:
        return x
    out, work = start_gather(x, axis)
    work.wait()
    return out


def all_reduce(x: Tensor, axis: Axis, op: Any = None) -> Tensor:
    """The sum (or another ``op``) over processes, in a new tensor; no gradient."""
    if axis.size == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op or dist.ReduceOp.SUM, group=axis.group)
    return out


def all_max(x: Tensor, axis: Axis) -> Tensor:
    """The greatest over processes; no gradient."""
    return all_reduce(x, axis, dist.ReduceOp.MAX)


def broadcast(x: Tensor, axis: Axis, source: int) -> Tensor:
    """What process ``source`` of the axis holds, in place on every process."""
    if axis.size > 1:
        dist.broadcast(x, axis.ranks[source], group=axis.group)
    return x


def sum_together(tensors: Sequence[Tensor], axis: Axis, bucket: int = 1 << 25) -> None:
    """Sum tensors over processes, in place, about ``bucket`` bytes at a time."""
    if axis.size == 1:
        return
    flights = []
    for together in _buckets(tensors, bucket):
        flat = torch.cat([tensor.flatten() for tensor in together])
        flights.append((together, flat, dist.all_reduce(flat, group=axis.group, async_op=True)))
    for together, flat, work in flights:
        work.wait()
        for tensor, part in zip(together, flat.split([tensor.numel() for tensor in together]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Tensors in their order, as many of one type together as ``limit`` bytes hold, at least one."""
    found: list[Tensor] = []
    for tensor in tensors:
        size = sum(other.numel() * other.element_size() for other in found)
        if found and (size + tensor.numel() * tensor.element_size() > limit or found[0].dtype != tensor.dtype):
            yield found
            found = []
        found.append(tensor)
    if found:
        yield found


def gather(x: Tensor, axis: Axis) -> Tensor:
    """[t, ...] slices -> [T, ...] on every process; gradients are summed and sliced again."""
    return _apply(x, axis, all_gather, _reduce_scatter)


def scatter(x: Tensor, axis: Axis) -> Tensor:
    """[T, ...] partial sums -> [t, ...] slice of the total; gradients are gathered."""
    return _apply(x, axis, _reduce_scatter, all_gather)


def share(parameter: Tensor, axis: Axis) -> Tensor:
    """A parameter that every process holds but each uses on its own slice: gradients are summed."""
    return _apply(parameter, axis, _same, all_reduce)


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
    """F.linear of the gathered [t, ..., n_in] slices: [T, ..., n_out].

    The backward pass gathers the slices anew, which need not be kept whole, while the gradient of the input is computed,
    and sums that gradient over processes while the gradient of the weight is (as in Korthikanti et al. 2022).
    """
    if axis.size == 1:
        return torch.nn.functional.linear(x, weight, bias)
    return _GatheredLinear.apply(x, weight, bias, axis)


def _reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    out, work = start_scatter(x, axis)
    work.wait()
    return out


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: Op, backward: Op) -> Tensor:
        ctx.axis, ctx.transpose = axis, backward
        return x.view_as(x) if forward is _same else forward(x, axis)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return ctx.transpose(outer[0], ctx.axis), None, None, None


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.biased = axis, bias is not None
        return torch.nn.functional.linear(all_gather(x, axis), weight, bias)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        [d_y] = outer
        whole, gathering = start_gather(x, ctx.axis)
        d_whole = d_y @ weight
        gathering.wait()
        d_x, scattering = start_scatter(d_whole, ctx.axis)
        rows = d_y.flatten(0, -2)
        d_weight = rows.t() @ whole.flatten(0, -2)
        d_bias = rows.sum(0) if ctx.biased else None
        scattering.wait()
        return d_x, d_weight, d_bias, None


def _apply(x: Tensor, axis: Axis, forward: Op, backward: Op) -> Tensor:
    return x if axis.size == 1 else _Collective.apply(x, axis, forward, backward)
