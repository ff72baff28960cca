"""Cross-entropy loss computed in chunks, without ever materialising all logits.

The gradient of each chunk is computed while its logits are in memory, so nothing is computed twice and memory is chunk x V
instead of T x B x V (as in Hsu et al. 2024, Liger Kernel, and others before).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpclm.model import count
from hpclm.model.compiled import compiled
from hpclm.model.head import Head, LogitShape
from hpclm.parallel.collectives import all_reduce, all_reduce_max, gather
from hpclm.parallel.main_gradients import add_product
from hpclm.parallel.mesh import Axis

ChunkMath = Callable[..., tuple[Tensor, Tensor, Tensor | None]]
Backward = Literal["once", "twice", "unscaled"]
"""How backward runs: once; ``twice`` if it may run again, as in zero-bubble schedules, at the cost of a copy of the weight gradient; or
``unscaled``, once and from a loss whose gradient is 1, so that nothing is multiplied."""


def nll_and_gradient(
    logits: Tensor, labels: Tensor, weights: Tensor, vocab: int, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """[n, V] logits, [n] labels and weights -> the weighted losses [n] in fp32; the gradient [n, V] of losses and z-losses, in the
    logits' type; and the weighted z-losses [n], or None. May change the logits in place.

    A z-loss is ``z_loss`` x (log of the softmax's normaliser)^2 (Chowdhery et al. 2022). Entries from ``vocab`` on are padding and get no
    probability.
    """
    # compiled, operations on entries are fused into one pass that never holds [n, V] in fp32; in place, they would not be
    compiling = torch.compiler.is_compiling()
    entry = torch.arange(logits.shape[-1], device=logits.device)
    if vocab < logits.shape[-1]:
        if compiling:
            logits = logits.masked_fill(entry >= vocab, -torch.inf)
        else:
            logits[:, vocab:] = -torch.inf
    # fp32: the normaliser sums tens of thousands of terms, which exceeds bf16's precision
    log_p = F.log_softmax(logits, -1, dtype=torch.float32)
    target = log_p.gather(-1, labels[:, None])[:, 0]
    factors = weights
    penalties = None
    if z_loss:
        z = logits.gather(-1, labels[:, None])[:, 0].float() - target
        factors = weights * (1 + 2 * z_loss * z)
        penalties = z_loss * z.square() * weights
    gradient = log_p.exp_().mul_(factors[:, None])
    if compiling:
        gradient = gradient - (entry == labels[:, None]) * weights[:, None]
    else:
        gradient.scatter_add_(-1, labels[:, None], -weights[:, None])
    return -target * weights, gradient.to(logits.dtype), penalties


def split_nll_and_gradient(
    logits: Tensor, labels: Tensor, weights: Tensor, vocab: int, tp: Axis, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Vocabulary-parallel version: each rank of ``tp`` has [n, V / tp] logits and gets all losses and the gradient of its logits.

    Communicates the maximum logit, then the sums of the softmax: 3 n numbers (Shoeybi et al. 2019, section 3).
    """
    first = tp.rank * logits.shape[-1]
    scores = logits.float()
    if first + logits.shape[-1] > vocab:
        scores[:, max(0, vocab - first) :] = -torch.inf
    mine = labels - first
    outside = (mine < 0) | (mine >= logits.shape[-1])
    mine = mine.masked_fill(outside, 0)[:, None]
    largest = all_reduce_max(scores.amax(-1), tp)
    # all ranks subtract the same maximum; otherwise their exponentials could not be added
    scores -= largest[:, None]
    target = scores.gather(-1, mine)[:, 0].masked_fill(outside, 0.0)
    p = scores.exp_()
    normaliser, target = all_reduce(torch.stack([p.sum(-1), target]), tp)
    log = normaliser.log()
    factors = weights
    penalties = None
    if z_loss:
        z = log + largest
        factors = weights * (1 + 2 * z_loss * z)
        penalties = z_loss * z.square() * weights
    gradient = p.mul_((factors / normaliser)[:, None])
    gradient.scatter_add_(-1, mine, -weights.masked_fill(outside, 0.0)[:, None])
    return (log - target) * weights, gradient.to(logits.dtype), penalties


class LossTerms(NamedTuple):
    """How to compute the loss of a micro-batch."""

    shape: LogitShape
    vocab: int
    """Entries of the vocabulary without padding."""
    chunk: int
    """Number of tokens with logits in memory at a time."""
    math: ChunkMath
    """Computes losses and gradients; may change its logits in place."""
    backward: Backward
    main_grad: Tensor | None
    """Receives the weight's gradient in place, which needs ``backward`` unscaled."""
    note: Callable[[Tensor], None]
    """Receives the weighted sums of z-losses."""


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, labels: Tensor, weights: Tensor, how: LossTerms
    ) -> Tensor:
        """[n, C] hidden, [V / tp, C] weight and rows, [n] labels and weights -> the weighted sum of losses. ``rows``: the weight in the
        type of ``hidden``.

        z-losses change the gradients only.
        """
        shape = how.shape
        chunk = how.chunk
        main_grad = how.main_grad
        d_hidden = torch.empty_like(hidden)
        d_weight = None
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            logits = shape.of(shape.product(hidden[part], rows))
            capped = None if shape.cap is None else logits.clone()  # ``math`` may change the logits in place
            losses, gradient, penalties = how.math(logits, labels[part], weights[part], how.vocab)
            gradient = shape.backward(gradient, capped).to(rows.dtype)
            total += losses.sum()
            if penalties is not None:
                how.note(penalties.sum())
            torch.mm(gradient, rows, out=d_hidden[part])
            if main_grad is not None:
                add_product(main_grad, gradient, hidden[part])
                continue
            if not ctx.needs_input_grad[1]:
                continue
            piece = gradient.t() @ hidden[part]
            if len(hidden) <= chunk and how.backward == "unscaled":
                d_weight = piece  # a single unscaled piece needs no copy in fp32
            else:
                # in fp32: bf16 would lose later chunks in the sum
                d_weight = piece.float() if d_weight is None else d_weight.add_(piece)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.how = how.backward
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        """Scale the gradients computed in the forward pass."""
        d_hidden, d_weight = ctx.saved_tensors
        [factor] = outer
        if ctx.how == "unscaled":
            return d_hidden, d_weight, *[None] * 4
        # not in place: the schedule's second backward pass needs them unscaled
        multiply = torch.mul if ctx.how == "twice" else Tensor.mul_
        scaled = [None if d is None else multiply(d, factor.to(d.dtype)) for d in (d_hidden, d_weight)]
        return *scaled, *[None] * 4


class TokenLoss:
    """Sum over tokens of weight x cross entropy; padding entries of the vocabulary get no probability."""

    def __init__(
        self, chunk: int | None = None, compile: bool = False, backward: Backward = "once", z_loss: float = 0.0
    ):
        """``z_loss``: coefficient of the z-losses, which change the gradients but not the loss."""
        self.chunk = chunk
        self.backward = backward
        self.z_loss = z_loss
        self.whole: ChunkMath = nll_and_gradient
        self.split: ChunkMath = split_nll_and_gradient
        if compile:
            self.whole = compiled(self.whole)
            self.split = compiled(self.split)
        if z_loss:
            self.whole = partial(self.whole, z_loss=z_loss)
            self.split = partial(self.split, z_loss=z_loss)

    def __call__(self, head: Head, labels: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """``labels`` and ``weights`` [B, T] -> a scalar in fp32, differentiable once, and the reports. With z-losses, each tensor-parallel
        rank reports an equal part of their sum.

        The weights include every factor of the loss (mask, 1 / tokens, loss scale): gradients in the compute type include those factors,
        so that fp16 does not underflow.
        """
        chunk = self.chunk or self._chosen(head, labels)
        whole = gather(head.hidden, head.tp)
        hidden = whole.flatten(0, 1)
        labels = labels.t().reshape(-1)
        weights = weights.t().reshape(-1)
        if torch.is_grad_enabled():
            penalties: list[Tensor] = []
            total = _ChunkedLoss.apply(
                hidden,
                head.weight,
                head.rows().detach(),
                labels,
                weights,
                LossTerms(
                    head.shape,
                    head.vocab_size,
                    chunk,
                    self.whole if head.tp.size == 1 else partial(self.split, tp=head.tp),
                    self.backward,
                    head.main_grad,
                    penalties.append,
                ),
            )
            # every tensor-parallel rank has the same sum, and the engine adds up the reports of all ranks
            if penalties:
                return total, {"z_loss": torch.stack(penalties).sum() / head.tp.size}
            return total, {}
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            total += self._losses(head, hidden[part], labels[part], weights[part]).sum()
        return total, {}

    @staticmethod
    def _chosen(head: Head, labels: Tensor) -> int:
        """Default tokens at a time: large matrix products on GPUs, cache-sized ones on CPUs."""
        if not labels.is_cuda:
            return 512
        memory = torch.cuda.get_device_properties(labels.device).total_memory
        return count.loss_chunk(labels.numel(), len(head.weight), memory)

    @staticmethod
    def _losses(head: Head, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """[n] weighted losses of a chunk, without a gradient."""
        if head.tp.size > 1:
            logits = head.shape.of(head.shape.product(hidden, head.rows()))
            return split_nll_and_gradient(logits, labels, weights, head.vocab_size, head.tp)[0]
        logits = head.shape.of(head.shape.product(hidden, head.rows()[: head.vocab_size]))
        return F.cross_entropy(logits.float(), labels, reduction="none") * weights
