"""Weight gradients added in place to the fp32 gradients that the optimizer reads: Megatron's main_grad.

The GEMM of a weight's gradient accumulates onto earlier micro-batches (beta = 1), so the gradient is never written in the compute type,
cast or read again. Autograd gets no gradient, but still calls the hooks of the weight. T tokens in a sequence, B sequences, C hidden
size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

LIBRARY = torch.library.Library("hpclm", "DEF")
LIBRARY.define("add_product_(Tensor(a!) total, Tensor a, Tensor b) -> ()")


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.is_cuda:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        # CPUs cannot multiply two bf16 matrices into an fp32 one, so here the product is rounded first
        total.add_(a.t() @ b)


LIBRARY.impl("add_product_", _add_product, "CompositeExplicitAutograd")
torch.library.register_fake("hpclm::add_product_", lambda total, a, b: None, lib=LIBRARY)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of [n, r]^T and [n, c] to the fp32 ``total`` [r, c]."""
    if torch.compiler.is_compiling():  # one opaque operation, which the compiler keeps in place
        torch.ops.hpclm.add_product_(total, a, b)
    else:
        _add_product(total, a, b)


def accumulated(parameter: Tensor, main_grad: Tensor) -> Tensor:
    """``parameter``; its gradient is added to ``main_grad``."""
    return _Accumulated.apply(parameter, main_grad)


class Products(Protocol):
    """Another way to compute two of the three products of a linear layer; the third, its weight's gradient, is unchanged."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T; gathers ``x`` first if the layer gathers its input."""

    def input_gradient(self, d_y: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        """A function that computes d_y W."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None, products: Products | None = None
) -> Tensor:
    """F.linear, using ``products`` if given; the gradient of the weight is added to ``main_grad`` if given."""
    if main_grad is None and products is None:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, main_grad, products)


def weight_gradient(d_y: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """The gradient of a linear layer's weight from [..., r] and [..., c], or None if it is added to ``main_grad``."""
    rows = d_y.flatten(0, -2)
    columns = x.flatten(0, -2)
    if main_grad is None:
        return rows.t() @ columns
    add_product(main_grad, rows, columns)
    return None


def embedding(ids: Tensor, weight: Tensor, main_grad: Tensor | None) -> Tensor:
    """F.embedding; the gradient of the table is added to ``main_grad`` if given."""
    return F.embedding(ids, weight) if main_grad is None else _Embedding.apply(ids, weight, main_grad)


def add_rows(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add each of the [n, C] rows to the row ``ids`` of ``total`` [V, C], always in the same order."""
    if len(total) <= len(ids):
        # sums the rows of one id in parallel; in a small vocabulary, the most frequent id has many of the rows
        total.add_(torch.ops.aten.embedding_dense_backward(rows, ids, len(total), -1, False))
    else:
        # sorts the ids, and adds the rows of one id one after the other; index_add_ uses atomics
        total.index_put_((ids,), rows, accumulate=True)


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(main_grad)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        [main_grad] = ctx.saved_tensors
        [gradient] = outer
        main_grad.add_(gradient)
        return None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None, products: Products | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, main_grad)
        ctx.products = products
        if products is None:
            return F.linear(x, weight, bias)
        y = products.output(x, weight)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        x, weight, main_grad = ctx.saved_tensors
        [d_y] = outer
        trained, biased = ctx.needs_input_grad[1:3]
        d_weight = weight_gradient(d_y, x, main_grad) if trained else None
        d_x = d_y @ weight if ctx.products is None else ctx.products.input_gradient(d_y, weight)()
        d_bias = d_y.flatten(0, -2).sum(0) if biased else None
        return d_x, d_weight, d_bias, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.main_grad = main_grad  # not saved: with tied embeddings, the loss may have added to it since
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        [ids] = ctx.saved_tensors
        [d_y] = outer
        add_rows(ctx.main_grad, ids.flatten(), d_y.flatten(0, -2).to(ctx.main_grad.dtype))
        return None, None, None
