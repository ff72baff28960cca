"""Causal self-attention.

T tokens, t of them on this process between layers, B sequences, C hidden size, D size of one head; H query heads and G key/value heads
on this process. With context parallelism, T is the number of tokens in this process's part of each sequence; only the core sees the keys
and values of whole sequences.
"""

import torch
from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.config.attention import AttentionConfig
from hpclm.model.attention.scores import Scores, core, largest_scores
from hpclm.model.context import LayerContext
from hpclm.model.init import TensorParallelModule
from hpclm.model.layers import ColumnLinear, Norm, ProjectionNorm, RowLinear
from hpclm.model.position import rotate
from hpclm.model.weights import Table
from hpclm.parallel.mesh import Axis


class SoftmaxAttention(TensorParallelModule):
    """What all kinds of softmax attention share: [t, B, C] -> [t, B, C]."""

    largest: Tensor | None = None
    """[H] fp32: running maximum of each head's scores in training, for QK-clip; None if not measured."""

    def __init__(self, mixer: AttentionConfig, recompute_core: bool, tp: Axis):
        super().__init__(tp)
        self.how = Scores(mixer.score_scale, mixer.score_cap)
        self.dropout = mixer.dropout
        self.recompute_core = recompute_core

    def attended(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, sinks: Tensor | None = None) -> Tensor:
        """[T, B, H or G, D] queries, keys and values -> [T, B, H x D]. ``sinks``: see Scores."""
        if self.largest is not None and self.training:
            keys = k if context.part is None else context.part.whole(k.detach())
            now = largest_scores(q.permute(1, 2, 0, 3), keys.permute(1, 2, 0, 3), self.how.scale, context)
            self.largest.copy_(torch.maximum(self.largest, now))
        how = self.how._replace(dropout=self.dropout if self.training else 0.0, sinks=sinks)
        return core(q, k, v, context, how, self.recompute_core and self.training)

    def clip_factors(self, largest: Tensor, limit: float) -> dict[str, Tensor]:
        """[L, H] the largest scores of the heads in L such layers -> for each linear layer, [L, rows] the factors of its rows that lower
        them to ``limit``."""
        raise NotImplementedError


class Attention(SoftmaxAttention):
    """Attention with grouped queries: [t, B, C] -> [t, B, C]."""

    def __init__(
        self,
        config: ModelConfig,
        mixer: AttentionConfig,
        table: Table,
        recompute_core: bool,
        generator: torch.Generator,
        tp: Axis,
    ):
        """``table``: made by weights.attention()."""
        super().__init__(mixer, recompute_core, tp)
        self.per_group = mixer.heads // mixer.groups
        self.width = config.head_width
        self.qkv = ColumnLinear(table.parts["qkv"], generator, tp)
        self.out = RowLinear(table.parts["out"], generator, tp)
        self.q_norm: ProjectionNorm | Norm | None = None
        self.k_norm: ProjectionNorm | Norm | None = None
        if mixer.qk_norm:
            kind = ProjectionNorm if mixer.qk_norm_span == "projection" else Norm
            self.q_norm = kind(config, table.parts["q_norm"], tp)
            self.k_norm = kind(config, table.parts["k_norm"], tp)
        self.sinks = self.optional(table, "sinks")

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.per_group + 2, self.width))  # [T, B, G, H/G + 2, D]
        q, k, v = heads.split([self.per_group, 1, 1], 3)
        q = q.flatten(2, 3)  # [T, B, H, D]
        k = k.squeeze(3)  # [T, B, G, D]
        v = v.squeeze(3)  # [T, B, G, D]
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if context.cos is not None and context.sin is not None:
            q = rotate(q, context.cos, context.sin)
            k = rotate(k, context.cos, context.sin)
        if context.cache is not None:
            k, v = context.cache.stored(self, k, v)
        return self.out(self.attended(q, k, v, context, self.sinks))

    def clip_factors(self, largest: Tensor, limit: float) -> dict[str, Tensor]:
        """See SoftmaxAttention."""
        by_key = largest.unflatten(1, (-1, self.per_group)).amax(2)
        # the root, since queries and keys are both scaled: their product falls by limit / largest
        factors = torch.where(by_key > limit, (limit / by_key).sqrt(), 1.0)
        # the rows of a group's queries and of its key; values do not enter scores
        group = [factors[..., None].expand(-1, -1, self.per_group + 1), torch.ones_like(factors)[..., None]]
        return {"qkv": torch.cat(group, 2).repeat_interleave(self.width, 2).flatten(1)}
