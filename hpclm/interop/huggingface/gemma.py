"""transformers' Gemma2ForCausalLM, Gemma3ForCausalLM (text) and VaultGemmaForCausalLM: norms whose weights are stored minus 1."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hpclm.config import ModelConfig
from hpclm.interop.huggingface import llama, shape
from hpclm.interop.rules import ConversionRule, changed, shifted

VAULT_MODULES = {"norm2": "pre_feedforward_layernorm"}
MODULES = VAULT_MODULES | {
    "post_norm1": "post_attention_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}
KEYS = {**llama.LLAMA.keys, "activation": "hidden_activation", "logit_cap": "final_logit_softcapping"}


def rules(config: ModelConfig, modules: Mapping[str, Any] = MODULES) -> Iterable[ConversionRule]:
    """The conversion rule of each weight."""
    return changed(llama.rules(config, modules), "norm", shifted)


def scalar(config: ModelConfig) -> int:
    """query_pre_attn_scalar, which must be a whole number."""
    if config.attention.score_scale is None:
        return config.head_width
    return max(1, round(config.attention.score_scale**-2))


GEMMA2 = replace(
    llama.LLAMA,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    keys={**KEYS, "attention.score_cap": "attn_logit_softcapping"},
    rules=rules,
    constants={**llama.LLAMA.constants, "norm_order": "sandwich", "embed_scale": True},
    parts=(shape.ROPE, shape.ATTENTION_BIASES, shape.STATED_WINDOWS),
    read=lambda tree: {"attention.score_scale": shape.number(tree, "query_pre_attn_scalar") ** -0.5},
    write=lambda config: {"query_pre_attn_scalar": scalar(config)},
    unread="hidden_act",
)


def write_rope_by_kind(config: ModelConfig) -> dict[str, Any]:
    """Gemma 3's kinds of layers, and their rotary positions by the older keys, which scale no layers with a window."""
    keys = shape.described_rope(config) | shape.layer_types(config, config.context)
    return keys | {"rope_local_base_freq": config.rope.window_base or config.rope.base}


GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    keys=KEYS,
    constants={**GEMMA2.constants, "attention.qk_norm": True},
    parts=(shape.Part(shape.kinds_of_positions, write_rope_by_kind), shape.ATTENTION_BIASES),
    unread="hidden_act _sliding_window_pattern",
)
VAULTGEMMA = replace(
    GEMMA2,
    architecture="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    rules=partial(rules, modules=VAULT_MODULES),
    constants={**GEMMA2.constants, "norm_order": "pre"},
)
ALL_FAMILIES = (GEMMA2, GEMMA3, VAULTGEMMA)
