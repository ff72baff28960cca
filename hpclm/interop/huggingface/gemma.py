"""transformers' Gemma2ForCausalLM and Gemma3ForCausalLM (text): norms before and after sublayers, with weights stored minus 1."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from hpclm.config import ModelConfig
from hpclm.config.checks import value_at
from hpclm.interop.huggingface import llama, shape
from hpclm.interop.huggingface.family import Json
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


def _read(tree: Json, kind: Any) -> dict[str, Any]:
    values = {ours: tree[key] for ours, key in CAPS.items()}
    scale = shape.number(tree, "query_pre_attn_scalar") ** -0.5
    layers = shape.layers(tree, kind, turned=True)
    return values | {"attention.score_scale": scale} | layers | shape.biases(tree, llama.ALL_ATTENTION)


def _described(config: ModelConfig) -> dict[str, Any]:
    return (
        shape.described_biases(config, llama.ALL_ATTENTION)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window or config.context}
        | {key: value_at(config, ours) for ours, key in CAPS.items()}
        | {"query_pre_attn_scalar": _scalar(config)}
    )


def _more(config: ModelConfig) -> Iterator[str]:
    """Reasons why a Gemma does not cover a network."""
    yield from shape.bias_obstacles(config, llama.ALL_ATTENTION)
    if not isinstance(_scalar(config), int):
        yield f"model.attention.score_scale={config.attention.score_scale}, but it needs 1 / sqrt(a whole number)"


def _scalar(config: ModelConfig) -> int | float:
    """query_pre_attn_scalar; an int if it is a whole number, as Gemma needs."""
    if config.attention.score_scale is None:
        return config.head_width
    scalar = config.attention.score_scale**-2
    if scalar > 0.5 and abs(scalar - round(scalar)) < 1e-6 * scalar:
        return round(scalar)
    return scalar


GEMMA2 = replace(
    llama.LLAMA,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    keys={**llama.LLAMA.keys, "activation": "hidden_activation"},
    rules=rules,
    needs={
        "positions": ("rope",),
        "norm": ("rmsnorm",),
        "norm_order": ("sandwich",),
        "activation": ("geglu_tanh", "geglu", "swiglu"),
        "embed_scale": (True,),
        "rope.fraction": (1.0,),
    },
    constant=lambda config: _described(config) | shape.described_rope(config),
    shape=lambda tree: _read(tree, shape.full_every(2)) | shape.rope(tree),
    covers=(*llama.LLAMA.covers, *CAPS, "attention.score_scale", "attention.pattern", "attention.window"),
    read=f"{llama.LLAMA.read} query_pre_attn_scalar {' '.join(CAPS.values())}",
    unread="hidden_act",
    wrong=lambda tree: (),
    more=_more,
)


def read_settings(tree: Json) -> dict[str, Any]:
    """Gemma 3's settings: layers with a window have their own rotary base, and only the others are scaled."""
    every = int(shape.number({"sliding_window_pattern": 6, **tree}, "sliding_window_pattern"))
    common = _read(tree, shape.full_every(every))
    full, near = shape.by_kind(tree)
    near.setdefault("rope_theta", tree.get("rope_local_base_freq", 10000.0))
    far = shape.rope(tree, 1e6, parameters=full)
    return common | far | shape.near(tree, near, far, common, 10000.0)


def described_gemma3(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_settings() reads."""
    if "truncate" in config.rope.scaling:
        return _described(config) | shape.described_by_kind(config)
    local = {"rope_local_base_freq": config.rope.window_base or config.rope.base}
    return _described(config) | {"rope_theta": config.rope.base, "rope_scaling": shape.scaling(config) or None} | local


GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    needs={**GEMMA2.needs, "attention.qk_norm": (True,), "attention.score_cap": (None,)},
    constant=described_gemma3,
    shape=read_settings,
    covers=(*GEMMA2.covers, *shape.WINDOW_SETTINGS),
    read=f"{llama.LLAMA.read} query_pre_attn_scalar final_logit_softcapping rope_local_base_freq sliding_window_pattern "
    "_sliding_window_pattern",
    unread="hidden_act _sliding_window_pattern",
    fixed=dict(attn_logit_softcapping=(None,), use_bidirectional_attention=(False, None)),
    more=lambda config: [*_more(config), *shape.unscaled_windows(config)],
)
