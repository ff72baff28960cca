"""Causal self-attention with grouped queries.

T tokens, t of them on this process between layers, B sequences, C hidden size, D size of one head; H query heads and G key/value heads
on this process. With context parallelism, T is the number of tokens in this process's part of each sequence; only the core sees the keys
and values of whole sequences.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpclm.config import ModelConfig
from hpclm.model.attention.layout import AttentionMetadata
from hpclm.model.attention.scores import Scores, attend, largest_scores
from hpclm.model.init import InitSpec, TensorParallelModule
from hpclm.model.layers import ColumnLinear, Norm, ProjectionNorm, RowLinear
from hpclm.model.position import rotate
from hpclm.parallel.mesh import Axis
from hpclm.parallel.placement import Placement


class Attention(TensorParallelModule):
    """[t, B, C] -> [t, B, C].

    For each key/value head, the fused projection stores its query heads, its key and its value next to each other (Megatron's layout).
    So a slice along dimension 0 is a complete attention over fewer heads.
    """

    largest: Tensor | None = None
    """[H] fp32: running maximum of each head's scores in training, for QK-clip; None if not measured."""

    def __init__(self, config: ModelConfig, recompute_core: bool, generator: torch.Generator, tp: Axis):
        super().__init__(tp)
        self.per_group = config.attention.heads // config.attention.groups
        self.width = config.head_width
        self.how = Scores(config.attention.score_scale, config.attention.score_cap)
        self.dropout = config.attention.dropout
        self.recompute_core = recompute_core
        fused = (config.attention.heads + 2 * config.attention.groups) * config.head_width
        (qkv_bias, out_bias, _) = config.biases
        self.qkv = ColumnLinear(config, fused, qkv_bias, generator, tp)
        self.out = RowLinear(config, config.attention_width, out_bias, generator, tp)
        self.q_norm: ProjectionNorm | Norm | None = None
        self.k_norm: ProjectionNorm | Norm | None = None
        if config.attention.qk_norm and config.attention.qk_norm_span == "projection":
            self.q_norm = ProjectionNorm(config, config.attention.heads, tp)
            self.k_norm = ProjectionNorm(config, config.attention.groups, tp)
        elif config.attention.qk_norm:
            self.q_norm = Norm(config, config.head_width, tp)
            self.k_norm = Norm(config, config.head_width, tp)
        sinks = InitSpec(Placement((config.attention.heads,), 0))
        self.sinks = self.optional_parameter("sinks", sinks, config.attention.sinks)

    def forward(self, x: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.per_group + 2, self.width))  # [T, B, G, H/G + 2, D]
        q, k, v = heads.split([self.per_group, 1, 1], 3)
        q = q.flatten(2, 3)  # [T, B, H, D]
        k = k.squeeze(3)  # [T, B, G, D]
        v = v.squeeze(3)  # [T, B, G, D]
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if metadata.cos is not None and metadata.sin is not None:
            q = rotate(q, metadata.cos, metadata.sin)
            k = rotate(k, metadata.cos, metadata.sin)
        if self.largest is not None and self.training:
            keys = k if metadata.part is None else metadata.part.whole(k.detach())
            now = largest_scores(q.permute(1, 2, 0, 3), keys.permute(1, 2, 0, 3), self.how.scale, metadata)
            self.largest.copy_(torch.maximum(self.largest, now))
        how = self.how._replace(dropout=self.dropout if self.training else 0.0, sinks=self.sinks)
        if metadata.cache is not None:
            y = metadata.cache.attend(self, q, k, v, metadata.mask, how)
        elif self.recompute_core and self.training and metadata.flex is None:  # FlexAttention stores no scores
            # attention dropout draws from PyTorch's generator: recomputation must restore its state
            random = bool(self.dropout)
            y = checkpoint(_core, q, k, v, metadata, how, use_reentrant=False, preserve_rng_state=random)
        else:
            y = _core(q, k, v, metadata, how)
        return self.out(y)


def _core(q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, how: Scores) -> Tensor:
    """Scores, softmax and weighted values: [T, B, H or G, D] -> [T, B, H x D]."""
    if metadata.part is not None:
        # keys and values in one gather, not two
        k, v = metadata.part.whole(torch.cat([k, v], 2)).chunk(2, 2)
    q, k, v = (z.permute(1, 2, 0, 3) for z in (q, k, v))
    return attend(q, k, v, metadata, how).permute(2, 0, 1, 3).flatten(2)
