"""From queries, keys and values to attention's output, with all operations on scores.

T tokens, t of them with queries on this process, B sequences, D size of one head; H query heads and G key/value heads on this process, P
= H / G.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpclm.model.attention.layout import ROWS_PER_BLOCK, visible
from hpclm.model.context import Flex, LayerContext
from hpclm.model.layers import capped, scaled
from hpclm.parallel.sequence import SequencePart, row_blocks

MAX_SAVED_CONTEXT = 512  # beyond it, the probabilities that blocked() saves for the backward pass take too much memory


class Scores(NamedTuple):
    """Operations of a layer on its scores."""

    scale: float | None = None
    """Factor; None: 1 / sqrt(D)."""
    cap: float | None = None
    """Scores become cap x tanh(score / cap) (Gemma 2)."""
    dropout: float = 0.0
    """Dropout probability of the attention weights."""
    sinks: Tensor | None = None
    """[H] logits that enter the softmax but add nothing to the output (gpt-oss)."""

    @property
    def plain(self) -> bool:
        """Whether PyTorch's scaled_dot_product_attention supports these operations."""
        return self.cap is None and self.sinks is None

    def factor(self, width: int) -> float:
        """Factor of the scores of heads of this width."""
        return self.scale or width**-0.5


PLAIN = Scores()
CAUSAL = LayerContext()
"""Causal attention to all earlier tokens."""


def core(q: Tensor, k: Tensor, v: Tensor, context: LayerContext, how: Scores, again: bool) -> Tensor:
    """Scores, softmax and weighted values: [T, B, H or G, D] -> [T, B, H x D], of this process's part of each sequence. ``again``: compute
    them a second time in the backward pass, which then needs no saved scores."""
    if again and context.flex is None:  # FlexAttention stores no scores
        # attention dropout draws from PyTorch's generator: recomputation must restore its state
        random = bool(how.dropout)
        return checkpoint(_core, q, k, v, context, how, use_reentrant=False, preserve_rng_state=random)
    return _core(q, k, v, context, how)


def _core(q: Tensor, k: Tensor, v: Tensor, context: LayerContext, how: Scores) -> Tensor:
    if context.part is not None:
        if k.shape == v.shape:  # one gather, not two
            k, v = context.part.whole(torch.cat([k, v], 2)).chunk(2, 2)
        else:
            k = context.part.whole(k)
            v = context.part.whole(v)
    q, k, v = (z.permute(1, 2, 0, 3) for z in (q, k, v))
    return attend(q, k, v, context, how).permute(2, 0, 1, 3).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, context: LayerContext, how: Scores = PLAIN) -> Tensor:
    """[B, H, t, D] queries, [B, G, T, D] keys and values -> [B, H, t, D]: by FlexAttention if ``context`` has its mask, else by PyTorch's
    kernels if the mask is plain, else in blocks. In generation, the queries are those of the last t tokens."""
    if context.flex is not None:
        alone = context.flex.alone
        run = flex_attention if alone is None else alone(flex_attention)
        return run(q, k, v, context.flex._replace(alone=None), how)
    if not (context.plain and how.plain):
        return blocked(q, k, v, how, context)
    if context.part is None:
        return dot_product_attention(q, k, v, how)
    return by_pieces(q, k, v, how, context.part) if whole_kernels(q) else blocked(q, k, v, how, context)


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, how: Scores = PLAIN) -> Tensor:
    """[B, H, T, D] queries, [B, G, T, D] keys and values -> [B, H, T, D], causal; a single query attends to all keys."""
    grouped = q.shape[1] != k.shape[1]
    if q.shape[2] == 1:
        # a single token needs no causal order, so the queries of a group take the place of a sequence
        group = q.reshape(len(q), k.shape[1], -1, q.shape[3])  # [B, G, H/G, D]
        y = F.scaled_dot_product_attention(group, k, v, dropout_p=how.dropout, scale=how.scale)
        return y.reshape(*q.shape[:3], -1)
    if not q.is_cuda and not how.dropout and not grouped and q.shape[2] <= MAX_SAVED_CONTEXT:
        return blocked(q, k, v, how)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, dropout_p=how.dropout, enable_gqa=grouped, scale=how.scale
    )


def whole_kernels(q: Tensor) -> bool:
    """Whether a kernel of PyTorch supports fewer queries than keys without a mask."""
    return q.is_cuda and torch.backends.cuda.flash_sdp_enabled() and not torch.compiler.is_compiling()


def by_pieces(q: Tensor, k: Tensor, v: Tensor, how: Scores, part: SequencePart) -> Tensor:
    """Causal attention for a part of the rows: [B, H, t, D] queries and [B, G, T, D] keys and values -> [B, H, t, D]."""
    from torch.nn.attention import bias  # not at the top: it imports torch._dynamo, which takes every process a second

    out = []
    for rows, (begin, end) in zip(q.chunk(len(part.pieces), 2), part.pieces, strict=True):
        # is_causal would align the mask with the first key; these queries are the last rows of their keys
        mask = bias.causal_lower_right(end - begin, end)
        keys = k[:, :, :end]
        values = v[:, :, :end]
        grouped = q.shape[1] != k.shape[1]
        out.append(F.scaled_dot_product_attention(rows, keys, values, mask, scale=how.scale, enable_gqa=grouped))
    return torch.cat(out, 2)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, flex: Flex, how: Scores = PLAIN) -> Tensor:
    """See attend(); without dropout. Fast only when compiled."""
    from torch.nn.attention import flex_attention as library

    slopes = flex.slopes
    cap = how.cap

    def changed(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        score = capped(score, cap)
        if slopes is None:
            return score
        if flex.rows is not None:
            row = flex.rows[row]
        return score + slopes[h] * (column - row)

    given = dict(
        score_mod=None if slopes is None and cap is None else changed,
        block_mask=flex.blocks,
        enable_gqa=q.shape[1] != k.shape[1],
        scale=how.scale,
    )
    if how.sinks is None:
        y: Tensor = library.flex_attention(q, k, v, **given)
        return y
    y, more = library.flex_attention(q, k, v, **given, return_aux=library.AuxRequest(lse=True))
    # with a sink s, softmax is scaled by exp(lse) / (exp(lse) + exp(s)) = sigmoid(lse - s)
    return y * torch.sigmoid(more.lse - how.sinks[:, None])[..., None].to(y.dtype)


def blocked(q: Tensor, k: Tensor, v: Tensor, how: Scores = PLAIN, context: LayerContext = CAUSAL) -> Tensor:
    """Causal attention by plain matrix products, one block of rows at a time, skipping columns that no row attends to.

    On CPUs, forward and backward at 256 tokens take three quarters of the time of PyTorch's flash kernel. For longer sequences, each
    block is recomputed in the backward pass, so that no [T, T] tensor exists.
    """
    q = (q * how.factor(q.shape[-1])).contiguous()
    if context.cache is None:  # otherwise each product copies its operands; a cache's are in order
        k = k.contiguous()
        v = v.contiguous()
    how = how._replace(scale=1.0)
    recompute = k.shape[2] > MAX_SAVED_CONTEXT and torch.is_grad_enabled()
    out = []
    for rows, begin, columns in _by_blocks(q, k, context):
        given = (rows, k[:, :, columns], v[:, :, columns], begin, how, context)
        out.append(checkpoint(_rows, *given, use_reentrant=False) if recompute else _rows(*given))
    return torch.cat(out, 2)


def _by_blocks(q: Tensor, k: Tensor, context: LayerContext) -> Iterator[tuple[Tensor, int, slice]]:
    """The queries of each block of at most ROWS_PER_BLOCK rows, the first row, and the columns up to the last row that any of them
    attends to. The first column is rounded down to a multiple of ROWS_PER_BLOCK."""
    pieces = ((k.shape[2] - q.shape[2], k.shape[2]),) if context.part is None else context.part.pieces
    blocks = list(row_blocks(pieces, ROWS_PER_BLOCK))
    for number, (rows, (begin, end)) in enumerate(zip(q.split([b - a for a, b in blocks], 2), blocks, strict=True)):
        first = context.starts[number] if context.starts else 0
        if context.window is not None:
            first = max(first, begin + 1 - context.window)
        yield rows, begin, slice(first // ROWS_PER_BLOCK * ROWS_PER_BLOCK, end)


def _rows(q: Tensor, k: Tensor, v: Tensor, begin: int, how: Scores, context: LayerContext) -> Tensor:
    """The output of the rows from ``begin`` on with queries ``q``; ``k`` and ``v`` end with the last of these rows."""
    scores = grouped_scores(q, k, how)
    rows, columns = _indices(begin, q, k)
    if context.plain:
        # only the square on the diagonal needs a mask; earlier columns are visible to every row of the block
        square = slice(k.shape[2] - q.shape[2], None)
        scores[..., square].masked_fill_(columns[square] > rows, -torch.inf)
        return weighted(scores, v, how)
    if context.slopes is not None:
        scores = scores + (context.slopes[:, None, None] * (columns - rows)).to(scores.dtype)
    return weighted(scores.masked_fill(~_visible(rows, columns, context), -torch.inf), v, how)


def _indices(begin: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the rows [rows, 1] from ``begin`` on, and of the columns [columns], of which the last is the last row."""
    end = begin + q.shape[2]
    rows = torch.arange(begin, end, device=q.device)[:, None]
    return rows, torch.arange(end - k.shape[2], end, device=q.device)


def _visible(rows: Tensor, columns: Tensor, context: LayerContext) -> Tensor:
    """[B or 1, 1, rows, columns]: see visible()."""
    documents = context.documents
    pair = None if documents is None else (documents[:, None, rows], documents[:, None, None, columns])
    return visible(rows[None, None], columns, context.window, pair)


def largest_scores(q: Tensor, k: Tensor, scale: float | None, context: LayerContext) -> Tensor:
    """[B, H, t, D] queries, [B, G, T, D] keys -> [H] each head's largest score, in fp32, before caps and biases; without gradient.

    Costs an extra product in blocks of rows, since the kernels of scaled_dot_product_attention do not return scores.
    """
    q = q.detach()
    k = k.detach()
    largest = q.new_full(q.shape[1:2], -torch.inf)
    for queries, begin, columns in _by_blocks(q, k, context):
        keys = k[:, :, columns]
        hidden = ~_visible(*_indices(begin, queries, keys), context)
        scores = grouped_scores(queries, keys, Scores(scale)).masked_fill(hidden, -torch.inf)
        largest = torch.maximum(largest, scores.amax((0, 2, 3)))
    return largest.float()


def grouped_scores(q: Tensor, k: Tensor, how: Scores) -> Tensor:
    """[B, H, T, D] queries and [B, G, S, D] keys -> [B, H, T, S] scores, scaled and capped."""
    q = scaled(q, how.factor(q.shape[-1]))
    scores = (q.reshape(len(q), k.shape[1], -1, q.shape[3]) @ k.transpose(-1, -2)).view(*q.shape[:3], -1)
    return capped(scores, how.cap)


def weighted(scores: Tensor, v: Tensor, how: Scores) -> Tensor:
    """[B, H, T, S] scores and [B, G, S, D] values -> [B, H, T, D]."""
    if how.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = how.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    if how.dropout:
        weights = F.dropout(weights, how.dropout)
    return (weights.reshape(len(v), v.shape[1], -1, v.shape[2]) @ v).view(*scores.shape[:3], -1)
