"""Next-token loss without ever holding all logits.

Rows of logits are made in chunks; each chunk's gradient is formed while its logits are there, so nothing is computed
twice and memory is chunk x V instead of T x B x V (as in Hsu et al. 2024, Liger Kernel, and others before).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpclm.model.gpt import Head
from hpclm.parallel.collectives import all_max, all_reduce, gather
from hpclm.parallel.mesh import Axis

ChunkMath = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def nll_and_gradient(logits: Tensor, labels: Tensor, weights: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """[n, V] logits, [n] labels and weights -> weighted losses [n] in fp32, and their gradient [n, V] in the logits' type.

    Entries from ``vocab`` on are padding and get no probability. Written without scatter, so that a compiler makes it one
    pass that never holds [n, V] in fp32.
    """
    entry = torch.arange(logits.shape[-1], device=logits.device)
    scores = logits.float()
    if vocab < logits.shape[-1]:
        scores = scores.masked_fill(entry >= vocab, -torch.inf)
    log_p = F.log_softmax(scores, -1)
    losses = -log_p.gather(-1, labels[:, None])[:, 0] * weights
    hit = (entry == labels[:, None]).float()
    return losses, ((log_p.exp() - hit) * weights[:, None]).to(logits.dtype)


def nll_and_gradient_in_place(logits: Tensor, labels: Tensor, weights: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The same without a compiler: fewer passes over memory than the formula above would take step by step."""
    if vocab < logits.shape[-1]:
        logits[:, vocab:] = -torch.inf
    log_p = F.log_softmax(logits, -1, dtype=torch.float32)
    losses = -log_p.gather(-1, labels[:, None])[:, 0] * weights
    gradient = log_p.exp_().mul_(weights[:, None])
    gradient.scatter_add_(-1, labels[:, None], -weights[:, None])
    return losses, gradient.to(logits.dtype)


def split_nll_and_gradient(
    logits: Tensor, labels: Tensor, weights: Tensor, vocab: int, tp: Axis
) -> tuple[Tensor, Tensor]:
    """The same where each process of ``tp`` has [n, V / tp] logits of its own rows: losses of all, and its own gradient.

    The greatest logit, then the sums that softmax needs, travel: 3 n numbers (Shoeybi et al. 2019, section 3).
    """
    first = tp.rank * logits.shape[-1]
    scores = logits.float()
    if first + logits.shape[-1] > vocab:
        scores[:, max(0, vocab - first) :] = -torch.inf
    mine = labels - first
    outside = (mine < 0) | (mine >= logits.shape[-1])
    mine = mine.masked_fill(outside, 0)[:, None]
    scores -= all_max(scores.amax(-1), tp)[:, None]
    target = scores.gather(-1, mine)[:, 0].masked_fill(outside, 0.0)
    p = scores.exp_()
    normaliser, target = all_reduce(torch.stack([p.sum(-1), target]), tp)
    losses = (normaliser.log() - target) * weights
    gradient = p.mul_((weights / normaliser)[:, None])
    gradient.scatter_add_(-1, mine, -weights.masked_fill(outside, 0.0)[:, None])
    return losses, gradient.to(logits.dtype)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        vocab: int,
        chunk: int,
        math: ChunkMath,
        tp: Axis,
        twice: bool,
    ) -> Tensor:
        """[n, C] hidden, [V / tp, C] weight, [n] labels, [n] weights -> the weighted sum of losses."""
        rows = weight.to(hidden.dtype)
        d_hidden, d_weight = torch.empty_like(hidden), None
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            logits = F.linear(hidden[part], rows)
            if tp.size > 1:
                losses, gradient = split_nll_and_gradient(logits, labels[part], weights[part], vocab, tp)
            else:
                losses, gradient = math(logits, labels[part], weights[part], vocab)
            total += losses.sum()
            torch.mm(gradient, rows, out=d_hidden[part])
            piece = gradient.t() @ hidden[part]
            d_weight = piece.float() if d_weight is None else d_weight.add_(piece)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.twice = twice
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        """Scale the gradients formed in the forward pass."""
        d_hidden, d_weight = ctx.saved_tensors
        [factor] = outer
        if ctx.twice:
            found = d_hidden * factor.to(d_hidden.dtype), d_weight * factor
        else:
            found = d_hidden.mul_(factor.to(d_hidden.dtype)), d_weight.mul_(factor)
        return *found, None, None, None, None, None, None, None


class TokenLoss:
    """Sum over tokens of weight x cross entropy; padding entries of the vocabulary get no probability."""

    def __init__(self, chunk: int | None = None, compile: bool = False, twice: bool = False):
        """``twice``: whether one backward pass may go through it twice, which costs a copy of the weight's gradient."""
        self.chunk, self.twice = chunk, twice
        self.math: ChunkMath = torch.compile(nll_and_gradient, dynamic=False) if compile else nll_and_gradient_in_place

    def __call__(self, head: Head, labels: Tensor, weights: Tensor) -> Tensor:
        """``labels`` and ``weights`` [B, T] -> a scalar in fp32, differentiable once.

        The weights carry every factor of the loss (mask, 1 / tokens, loss scale): gradients are formed in the compute
        type with those factors in, so that fp16 does not lose them.
        """
        chunk = self.chunk or (4096 if labels.is_cuda else 512)  # large products on GPUs, caches on CPUs
        whole = gather(head.hidden, head.tp)
        hidden, labels, weights = whole.flatten(0, 1), labels.t().reshape(-1), weights.t().reshape(-1)
        if torch.is_grad_enabled():
            return _ChunkedLoss.apply(
                hidden, head.weight, labels, weights, head.vocab_size, chunk, self.math, head.tp, self.twice
            )
        if head.tp.size > 1:
            return self._split(head, hidden, labels, weights, chunk)
        rows = head.weight[: head.vocab_size].to(hidden.dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            losses = F.cross_entropy(F.linear(hidden[part], rows).float(), labels[part], reduction="none")
            total += (losses * weights[part]).sum()
        return total

    def _split(self, head: Head, hidden: Tensor, labels: Tensor, weights: Tensor, chunk: int) -> Tensor:
        """The weighted sum without a gradient, where each process has rows of its own."""
        rows = head.weight.to(hidden.dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            logits = F.linear(hidden[part], rows)
            total += split_nll_and_gradient(logits, labels[part], weights[part], head.vocab_size, head.tp)[0].sum()
        return total
