"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

T tokens in a sequence, t of them on this process between layers, B sequences, C hidden size; H heads on this process. A head's query and
key have N features without positions and R with rotary positions; its value has V. The key's R features are shared by all heads. K is
model.attention.latent.kv_rank. With context parallelism, T is the number of tokens in this process's part of each sequence.
"""

import torch
from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.config.attention import AttentionConfig
from hpclm.model.attention.layer import SoftmaxAttention
from hpclm.model.context import LayerContext
from hpclm.model.layers import ColumnLinear, Norm, RowLinear, WholeLinear
from hpclm.model.position import rotate
from hpclm.model.weights import Table
from hpclm.parallel.collectives import gather
from hpclm.parallel.mesh import Axis


class LatentAttention(SoftmaxAttention):
    """[t, B, C] -> [t, B, C]."""

    def __init__(
        self,
        config: ModelConfig,
        mixer: AttentionConfig,
        table: Table,
        recompute_core: bool,
        generator: torch.Generator,
        tp: Axis,
    ):
        """``table``: of weights.latent_attention()."""
        super().__init__(mixer, recompute_core, tp)
        latent = mixer.latent
        self.rank = latent.kv_rank
        self.sizes = config.head_dim, latent.rope_dim
        self.width = config.head_width
        self.value_width = config.value_width
        parts = table.parts
        self.q_a: WholeLinear | None = None
        self.q_norm: Norm | None = None
        if latent.q_rank:
            self.q_a = WholeLinear(parts["q_a"], generator, tp)
            self.q_norm = Norm(config, parts["q_norm"], tp, latent.norm_eps)
        self.q_b = ColumnLinear(parts["q_b"], generator, tp)
        self.kv_a = WholeLinear(parts["kv_a"], generator, tp)
        self.kv_norm = Norm(config, parts["kv_norm"], tp, latent.norm_eps)
        self.kv_b = ColumnLinear(parts["kv_b"], generator, tp)
        self.out = RowLinear(parts["out"], generator, tp)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[t, B, C] -> [t, B, C]."""
        narrow = x if self.q_a is None or self.q_norm is None else self.q_norm(self.q_a(x))
        q = self.q_b(narrow).unflatten(-1, (-1, self.width))  # [T, B, H, N + R]
        latent, shared = self.kv_a(x).split([self.rank, self.sizes[1]], -1)
        latent = self.kv_norm(latent)  # [t, B, K]
        shared = gather(shared, self.tp)[:, :, None]  # [T, B, 1, R]
        if context.cos is not None and context.sin is not None:
            plain, turned = q.split(self.sizes, -1)
            q = torch.cat([plain, rotate(turned, context.cos, context.sin)], -1)
            shared = rotate(shared, context.cos, context.sin)
        if context.cache is not None:
            [kept] = context.cache.stored(self, torch.cat([latent, shared[:, :, 0]], -1))
            latent = kept[..., : self.rank]
            shared = kept[..., None, self.rank :]
        k, v = self._keys_and_values(latent, shared)
        return self.out(self.attended(q, k, v, context))

    def clip_factors(self, largest: Tensor, limit: float) -> dict[str, Tensor]:
        """See SoftmaxAttention. The key with positions is shared, so its queries take the whole factor (Kimi Team 2025, section
        2.1)."""
        factors = torch.where(largest > limit, limit / largest, 1.0)[..., None]
        plain, turned = self.sizes
        roots = factors.sqrt().expand(-1, -1, plain)
        queries = torch.cat([roots, factors.expand(-1, -1, turned)], 2)
        keys = torch.cat([roots, torch.ones_like(factors).expand(-1, -1, self.value_width)], 2)
        return {"q_b": queries.flatten(1), "kv_b": keys.flatten(1)}

    def _keys_and_values(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """[t, B, K] and [T, B, 1, R] -> [T, B, H, N + R] and [T, B, H, V]."""
        heads = self.kv_b(latent).unflatten(-1, (-1, self.sizes[0] + self.value_width))
        plain, v = heads.split([self.sizes[0], self.value_width], -1)
        return torch.cat([plain, shared.expand(*plain.shape[:3], -1)], -1), v
