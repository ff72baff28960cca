"""Causal self-attention with grouped queries.

T tokens, t of them on this process between layers, B sequences, C hidden size, D size of one head; H query heads and G
key/value heads on this process.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpclm.config import ModelConfig
from hpclm.model.layers import ColumnLinear, Norm, RowLinear
from hpclm.model.position import AttentionMetadata, Flex, rotate
from hpclm.parallel.mesh import Axis

BLOCK = 128
LONGEST = 512  # beyond it, the probabilities that blocked() saves for the backward pass take too much memory


class Attention(nn.Module):
    """[t, B, C] -> [t, B, C].

    The fused projection stores, for each key/value head, its query heads, its key and its value next to each other
    (Megatron's layout), so that a slice along dimension 0 is a complete attention over fewer heads.
    """

    def __init__(self, config: ModelConfig, recompute_core: bool, generator: torch.Generator, tp: Axis):
        super().__init__()
        self.per_group, self.width = config.heads // config.groups, config.head_width
        self.dropout, self.recompute_core = config.attention_dropout, recompute_core
        fused = (config.heads + 2 * config.groups) * config.head_width
        self.qkv = ColumnLinear(config.hidden, fused, config.bias, config.init_std, generator, tp)
        std = config.init_std / (2 * config.layers) ** 0.5
        self.out = RowLinear(config.hidden, config.hidden, config.bias, std, generator, tp)
        self.q_norm = Norm(config, config.head_width, tp) if config.qk_norm else None
        self.k_norm = Norm(config, config.head_width, tp) if config.qk_norm else None

    def forward(self, x: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.per_group + 2, self.width))  # [T, B, G, H/G + 2, D]
        q, k, v = heads.split([self.per_group, 1, 1], 3)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)  # [T, B, H or G, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if metadata.cos is not None and metadata.sin is not None:
            q, k = rotate(q, metadata.cos, metadata.sin), rotate(k, metadata.cos, metadata.sin)
        if metadata.cache is not None:
            y = metadata.cache.attend(self, q, k, v, metadata.mask)
        elif metadata.flex is not None:  # keeps no scores, so there is no core to recompute
            y = self._flex(q, k, v, metadata.flex)
        elif self.recompute_core and self.training:
            random = bool(self.dropout)
            y = checkpoint(self._core, q, k, v, metadata.mask, use_reentrant=False, preserve_rng_state=random)
        else:
            y = self._core(q, k, v, metadata.mask)
        return self.out(y)

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, flex: Flex) -> Tensor:
        """As _core, by FlexAttention."""
        q, k, v = (z.permute(1, 2, 0, 3) for z in (q, k, v))
        return flex_attention(q, k, v, flex).permute(2, 0, 1, 3).flatten(2)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[T, B, H or G, D] -> [T, B, H x D]: scores, softmax and weighted values."""
        q, k, v = (z.permute(1, 2, 0, 3) for z in (q, k, v))
        y = dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        return y.permute(2, 0, 1, 3).flatten(2)


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """[B, H, T, D] queries, [B, G, T, D] keys and values -> [B, H, T, D].

    ``mask`` [B or 1, 1 or H, T, T] is True where attention is allowed, or is added to the scores; None: causal.
    """
    grouped = q.shape[1] != k.shape[1]
    if not q.is_cuda and mask is None and not dropout and not grouped and q.shape[2] <= LONGEST:
        return blocked(q, k, v)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, enable_gqa=grouped
    )


def flex_attention(q: Tensor, k: Tensor, v: Tensor, flex: Flex) -> Tensor:
    """As dot_product_attention, without dropout and without a [T, T] tensor; only fast where it is compiled."""
    from torch.nn.attention import flex_attention as library

    slopes = flex.slopes

    def biased(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        assert slopes is not None
        return score + slopes[h] * (column - row)

    bias, grouped = None if slopes is None else biased, q.shape[1] != k.shape[1]
    y: Tensor = library.flex_attention(q, k, v, score_mod=bias, block_mask=flex.blocks, enable_gqa=grouped)
    return y


def blocked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by plain matrix products, one block of rows at a time, skipping the masked columns.

    On CPUs this takes three quarters of the time of PyTorch's flash kernel, forward and backward, at 256 tokens.
    """
    q, k, v = (z.contiguous() for z in (q * q.shape[-1] ** -0.5, k, v))  # otherwise each product copies its operands
    out = []
    for begin in range(0, q.shape[2], BLOCK):
        rows = q[:, :, begin : begin + BLOCK]
        size = rows.shape[2]
        scores = rows @ k[:, :, : begin + size].transpose(-1, -2)
        above = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        scores[..., begin:].masked_fill_(above, -torch.inf)
        out.append(scores.softmax(-1) @ v[:, :, : begin + size])
    return torch.cat(out, 2)
