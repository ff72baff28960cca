"""Causal self-attention with grouped queries.

T tokens, t of them on this process between layers, B sequences, C hidden width, D width of one head; H query heads and G
key/value heads on this process, which are all with one.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpclm import apex
from hpclm.config import ModelConfig
from hpclm.model.kernels import attention
from hpclm.model.layers import ColumnLinear, Norm, RowLinear
from hpclm.model.position import Layout, rotate
from hpclm.parallel.mesh import Axis


class Attention(nn.Module):
    """[t, B, C] -> [t, B, C].

    The fused projection keeps, for each key/value head, its query heads, its key and its value together (Megatron's
    order), so that a slice of it along dimension 0 is a whole attention over fewer heads.
    """

    def __init__(self, config: ModelConfig, recompute_core: bool, generator: torch.Generator, tp: Axis):
        super().__init__()
        self.per_group, self.width = config.heads // config.groups, config.head_width
        self.dropout, self.recompute_core = config.attention_dropout, recompute_core
        self.fused = apex.kernels() if config.kernels == "apex" else None
        fused = (config.heads + 2 * config.groups) * config.head_width
        self.qkv = ColumnLinear(config.hidden, fused, config.bias, config.init_std, generator, tp)
        std = config.init_std / (2 * config.layers) ** 0.5
        self.out = RowLinear(config.hidden, config.hidden, config.bias, std, generator, tp)
        self.q_norm = Norm(config, config.head_width, tp) if config.qk_norm else None
        self.k_norm = Norm(config, config.head_width, tp) if config.qk_norm else None

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.per_group + 2, self.width))  # [T, B, G, H/G + 2, D]
        q, k, v = heads.split([self.per_group, 1, 1], 3)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)  # [T, B, H or G, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if layout.cos is not None and layout.sin is not None:
            q, k = self._turned(q, layout.cos, layout.sin), self._turned(k, layout.cos, layout.sin)
        if self.recompute_core and self.training:
            y = checkpoint(self._core, q, k, v, layout.mask, use_reentrant=False)
        else:
            y = self._core(q, k, v, layout.mask)
        return self.out(y)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, B, H or G, D] with each pair of features turned by its token's angle."""
        if self.fused and self.fused.rotate and x.is_cuda and cos.shape[1] == 1:  # the same angles in all sequences
            return self.fused.rotate(x, cos, sin)
        return rotate(x, cos, sin)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[T, B, H or G, D] -> [T, B, H x D]: scores, softmax, and the mean of the values."""
        q, k, v = (z.permute(1, 2, 0, 3) for z in (q, k, v))
        y = attention(q, k, v, mask, self.dropout if self.training else 0.0)
        return y.permute(2, 0, 1, 3).flatten(2)
