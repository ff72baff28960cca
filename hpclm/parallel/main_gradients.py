"""Gradients of weights, added in place to the fp32 gradients that the optimizer reads: Megatron's main_grad.

The product that makes a weight's gradient adds it to the sum of earlier micro-batches (beta = 1), so it is never written in the
compute type, cast or read again. What autograd gets in its place is memory that is not filled: it only says that the gradient
is complete. T tokens in a sequence, B sequences, C hidden size, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LIBRARY = torch.library.Library("hpclm", "DEF")
LIBRARY.define("add_product_(Tensor(a!) total, Tensor a, Tensor b) -> ()")


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.is_cuda:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        # CPUs multiply no two bf16 matrices into an fp32 one, so here the product is rounded first
        total.add_(a.t() @ b)


LIBRARY.impl("add_product_", _add_product, "CompositeExplicitAutograd")
torch.library.register_fake("hpclm::add_product_", lambda total, a, b: None, lib=LIBRARY)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of [n, r]^T and [n, c] to ``total`` [r, c], which is fp32."""
    if torch.compiler.is_compiling():  # one opaque operation, which the compiler keeps in place
        torch.ops.hpclm.add_product_(total, a, b)
    else:
        _add_product(total, a, b)


def unfilled(weight: Tensor) -> Tensor:
    """What autograd gets as the gradient of a weight whose gradient has been added in place."""
    # not zeros: ComputeCopies drops it unread, and filling it would cost a pass over memory for every weight
    return weight.new_empty(weight.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None) -> Tensor:
    """F.linear; the gradient of the weight is added to ``main_grad``, if that is given."""
    if main_grad is None:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, main_grad)


def embedding(ids: Tensor, weight: Tensor, main_grad: Tensor | None) -> Tensor:
    """F.embedding; the gradient of the table is added to ``main_grad``, if that is given."""
    return F.embedding(ids, weight) if main_grad is None else _Embedding.apply(ids, weight, main_grad)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, main_grad)
        ctx.biased = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        x, weight, main_grad = ctx.saved_tensors
        [d_y] = outer
        rows = d_y.flatten(0, -2)
        add_product(main_grad, rows, x.flatten(0, -2))
        return d_y @ weight, unfilled(weight), rows.sum(0) if ctx.biased else None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.main_grad = main_grad  # not saved: the loss may have added to it since, if the embeddings are tied
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        ids, weight = ctx.saved_tensors
        [d_y] = outer  # index_put_ sorts the ids, so the order of the sums is always the same; index_add_ uses atomics
        rows = d_y.flatten(0, -2).to(ctx.main_grad.dtype)
        ctx.main_grad.index_put_((ids.flatten(),), rows, accumulate=True)
        return None, unfilled(weight), None
