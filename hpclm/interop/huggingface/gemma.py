"""transformers' Gemma2ForCausalLM and Gemma3ForCausalLM (text): norms before and after sublayers, with weights stored minus 1."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hpclm.config import ModelConfig
from hpclm.config.checks import value_at
from hpclm.interop.huggingface import llama, shape
from hpclm.interop.huggingface.completion import Keys
from hpclm.interop.rules import ConversionRule, changed, shifted

MODULES = {
    "post_norm1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}
CAPS = {"attention.score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}


def rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight."""
    return changed(llama.rules(config, MODULES), "norm", shifted)


def _read(tree: Keys) -> dict[str, Any]:
    values = {ours: tree.get(key) for ours, key in CAPS.items()}
    scale = shape.number(tree, "query_pre_attn_scalar") ** -0.5
    return values | {"attention.score_scale": scale} | shape.biases(tree, llama.ALL_ATTENTION)


def _write(config: ModelConfig) -> dict[str, Any]:
    return (
        shape.described_biases(config, llama.ALL_ATTENTION)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window or config.context}
        | {key: value_at(config, ours) for ours, key in CAPS.items()}
        | {"query_pre_attn_scalar": _scalar(config)}
    )


def _scalar(config: ModelConfig) -> int:
    """query_pre_attn_scalar, which must be a whole number."""
    if config.attention.score_scale is None:
        return config.head_width
    return max(1, round(config.attention.score_scale**-2))


GEMMA2 = replace(
    llama.LLAMA,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    keys={**llama.LLAMA.keys, "activation": "hidden_activation"},
    rules=rules,
    constants={**llama.LLAMA.constants, "norm_order": "sandwich", "embed_scale": True},
    write=lambda config: _write(config) | shape.described_rope(config),
    read=lambda tree: _read(tree) | shape.layers(tree, turned=True) | shape.rope(tree),
    unread="hidden_act",
)


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    """Layers with a window have their own rotary base, and only the others are scaled."""
    if "truncate" in config.rope.scaling:
        return _write(config) | shape.described_by_kind(config)
    local = {"rope_local_base_freq": config.rope.window_base or config.rope.base}
    return _write(config) | {"rope_theta": config.rope.base, "rope_scaling": shape.scaling(config) or None} | local


GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    constants={**GEMMA2.constants, "attention.qk_norm": True, "attention.score_cap": None},
    write=write_gemma3,
    newer=lambda config: "truncate" in config.rope.scaling,
    read=lambda tree: _read(tree) | shape.kinds_of_positions(tree),
    unread="hidden_act _sliding_window_pattern",
)
