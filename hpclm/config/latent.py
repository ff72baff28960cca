"""Settings of multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2)."""

from dataclasses import dataclass

from hpclm.config.section import Section
from hpclm.config.setting import setting

RANK = "model.attention.latent.kv_rank"
MAX_WIDTH = 1 << 24
"""A limit that keeps a wrong number from building layers for hours, and products of sizes within 64 bits."""


@dataclass(frozen=True)
class LatentConfig(Section, key="model.attention.latent"):
    """Keys and values of all heads come from one narrow vector of a token, and from a key with positions that all heads share."""

    kv_rank: int = setting(
        0,
        "Width of the vector from which all heads' keys and values come (kv_lora_rank of DeepSeek-V2); 0: usual attention.",
        at_least=0,
        at_most=MAX_WIDTH,
    )
    q_rank: int | None = setting(
        None,
        "Width of the vector from which queries come (q_lora_rank); null: they come from the hidden state.",
        at_least=1,
        at_most=MAX_WIDTH,
        only_with=RANK,
    )
    rope_dim: int = setting(
        64,
        "Features of a query and key with rotary positions, beside the model.attention.head_dim without "
        "(qk_rope_head_dim).",
        at_least=2,
        at_most=MAX_WIDTH,
        only_with=RANK,
    )
    value_dim: int | None = setting(
        None,
        "Size of a head's values (v_head_dim); null: model.attention.head_dim.",
        at_least=1,
        at_most=MAX_WIDTH,
        only_with=RANK,
    )
    norm_eps: float = setting(1e-6, "Epsilon of the norms of both vectors.", at_least=0, only_with=RANK)
