"""The collectives of tensor and sequence parallelism, each with its conjugate as gradient.

Activations are [sequence, batch, hidden]. Between layers each tensor-parallel rank holds one slice of the sequence; inside attention and
MLP it holds the whole sequence and a slice of the weights (Korthikanti et al. 2022). ``gather`` enters such a region and ``scatter``
leaves it. With one process they are no-ops.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hpclm.parallel.main_gradients import Products, linear, weight_gradient
from hpclm.parallel.mesh import Axis

# torch 2.13 renames these two and deprecates the old names
gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# for compiled code: work objects caused 22 graph breaks in a compiled model with parallel.tensor=2
functional: Any = torch.ops._c10d_functional
Op = Callable[[Tensor, Axis], Tensor]
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def start_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Any]:
    """Start to gather [t, ...] slices. Returns the [T, ...] output, and the work that finish() waits for."""
    if torch.compiler.is_compiling():
        return functional.all_gather_into_tensor(x.contiguous(), axis.size, axis.name), None
    # process groups refuse tensors that are not contiguous
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    return out, gather_into(out, x.contiguous(), group=axis.group, async_op=True)


def start_scatter(x: Tensor, axis: Axis) -> tuple[Tensor, Any]:
    """Start to reduce-scatter [T, ...] tensors. Returns the [t, ...] output, and the work that finish() waits for."""
    if torch.compiler.is_compiling():
        return functional.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.name), None
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    return out, scatter_into(out, x.contiguous(), group=axis.group, async_op=True)


def finish(out: Tensor, work: Any) -> Tensor:
    """Wait for the collective that fills ``out``; returns ``out``. ``work`` is None in compiled code."""
    if work is None:
        return functional.wait_tensor(out)
    work.wait()
    return out


def wait(work: Any) -> None:
    """Wait for a collective. A thread that hangs in this package is recognised as waiting for other ranks."""
    work.wait()


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[t, ...] slices -> [T, ...] on every process; no gradient."""
    return x if axis.size == 1 else finish(*start_gather(x, axis))


def all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
    """The sum (or maximum) over processes, in a new tensor; no gradient."""
    if axis.size == 1:
        return x
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), op, axis.name))
    # autograd may still need x, and dist.all_reduce writes into its argument
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, REDUCTIONS[op], group=axis.group)
    return out


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """The maximum over processes; no gradient."""
    return all_reduce(x, axis, "max")


def union(names: Set[str], axis: Axis) -> set[str]:
    """The union of all processes' names."""
    # strings hash differently in every process: code that depends on the order of this set must sort it first
    return set().union(*all_gather_objects({*names}, axis))


def all_gather_objects(value: Any, axis: Axis) -> list[Any]:
    """The values of all processes, in order; they are pickled."""
    everyone = [value] * axis.size
    if axis.size > 1:
        dist.all_gather_object(everyone, value, group=axis.group)
    return everyone


def broadcast(x: Tensor, axis: Axis, source: int) -> Tensor:
    """Broadcast ``x`` from rank ``source`` of the axis, in place."""
    if axis.size > 1:
        # PyTorch expects the source's global rank, even in a group
        dist.broadcast(x, axis.ranks[source], group=axis.group)
    return x


def all_to_all(sent: Sequence[Tensor], counts: Sequence[int], like: Tensor, axis: Axis) -> Sequence[Tensor]:
    """Send vector i to process i, and receive ``counts[i]`` values from it, like ``like``. Missing entries count as empty."""
    if axis.size == 1:
        return sent
    sizes = [len(vector) for vector in sent] + [0] * (axis.size - len(sent))
    counts = [*counts, *[0] * (axis.size - len(counts))]
    out = like.new_empty(sum(counts))
    # ``like[:0]`` gives the type and device if this process sends nothing
    dist.all_to_all_single(out, torch.cat([like[:0], *sent]), counts, sizes, group=axis.group)
    return out.split(counts)


def all_reduce_in_place(tensors: Sequence[Tensor], axis: Axis) -> None:
    """All-reduce (sum) tensors in place, in one message for each type."""
    if axis.size == 1:
        return
    # one message for each type, since every message pays the latency; a dict, unlike a set, has the same order on all ranks
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        group = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in group])
        dist.all_reduce(flat, group=axis.group)
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view_as(tensor))


def gather(x: Tensor, axis: Axis) -> Tensor:
    """[t, ...] slices -> [T, ...] on every process; gradients are reduce-scattered."""
    return _apply(x, axis, all_gather, _reduce_scatter)


def scatter(x: Tensor, axis: Axis) -> Tensor:
    """[T, ...] partial sums -> [t, ...] slice of the total; gradients are all-gathered."""
    return _apply(x, axis, _reduce_scatter, all_gather)


def copy_to_tp(parameter: Tensor, axis: Axis) -> Tensor:
    """A replicated parameter that each rank applies to its own slice of the sequence: gradients are all-reduced.

    Megatron's copy_to_tensor_parallel_region.
    """
    return _apply(parameter, axis, _same, all_reduce)


def sum_over_tp(x: Tensor, axis: Axis) -> Tensor:
    """The sum of all processes' values, which each process then uses differently, so gradients are all-reduced too."""
    return _apply(x, axis, all_reduce, all_reduce)


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    """Send ``sent[i]`` of the rows of ``x`` to process i, and return the [sum of ``received``, ...] rows that arrive; differentiable."""
    return x if axis.size == 1 else _ExchangedRows.apply(x, tuple(sent), tuple(received), axis)


def gathered_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    main_grad: Tensor | None = None,
    products: Products | None = None,
) -> Tensor:
    """F.linear of the gathered [t, ..., n_in] slices: [T, ..., n_out].

    The gathered input is not saved (Korthikanti et al. 2022). The backward pass gathers it again while it computes the gradient of the
    input. It reduce-scatters that gradient while it computes the gradient of the weight. ``main_grad`` and ``products``: see linear().
    """
    if axis.size == 1:
        return linear(x, weight, bias, main_grad, products)
    return _GatheredLinear.apply(x, weight, bias, axis, main_grad, products)


def _reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    return finish(*start_scatter(x, axis))


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: Op, backward: Op) -> Tensor:
        ctx.axis = axis
        ctx.transpose = backward
        return x.view_as(x) if forward is _same else forward(x, axis)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return ctx.transpose(outer[0], ctx.axis), None, None, None


class _ExchangedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: tuple[int, ...], received: tuple[int, ...], axis: Axis) -> Tensor:
        ctx.counts = (sent, received)
        ctx.axis = axis
        return _exchange(x, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        sent, received = ctx.counts
        return _exchange(outer[0], received, sent, ctx.axis), None, None, None


def _exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=axis.group)
    return out


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        main_grad: Tensor | None,
        products: Products | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, main_grad)
        ctx.axis = axis
        ctx.products = products
        if products is None:
            return torch.nn.functional.linear(all_gather(x, axis), weight, bias)
        y = products.output(x, weight)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        x, weight, main_grad = ctx.saved_tensors
        [d_y] = outer
        trained, biased = ctx.needs_input_grad[1:3]
        multiply = None if ctx.products is None else ctx.products.input_gradient(d_y, weight)
        # this order hides both transfers: the gather overlaps the input's gradient, and the scatter the weight's
        whole, gathering = start_gather(x, ctx.axis)
        d_whole = d_y @ weight if multiply is None else multiply()
        whole = finish(whole, gathering)
        d_x, scattering = start_scatter(d_whole, ctx.axis)
        d_weight = weight_gradient(d_y, whole, main_grad) if trained else None
        d_bias = d_y.flatten(0, -2).sum(0) if biased else None
        d_x = finish(d_x, scattering)
        return d_x, d_weight, d_bias, None, None, None


def _apply(x: Tensor, axis: Axis, forward: Op, backward: Op) -> Tensor:
    return x if axis.size == 1 else _Collective.apply(x, axis, forward, backward)
