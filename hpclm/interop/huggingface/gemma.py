"""transformers' Gemma2ForCausalLM and Gemma3ForCausalLM (text): norms before and after sublayers, with weights that 1 is added to."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hpclm.config import ModelConfig
from hpclm.interop.huggingface import llama, shape
from hpclm.interop.huggingface.family import Json
from hpclm.interop.rules import Rule, shifted

MODULES = {
    "post_norm1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}
CAPS = dict(score_cap="attn_logit_softcapping", logit_cap="final_logit_softcapping")


def rules(config: ModelConfig) -> Iterable[Rule]:
    """How each weight is converted."""
    for rule in llama.rules(config, MODULES):
        yield shifted(rule) if "norm" in rule.ours else rule


def _read(tree: Json, caps: tuple[float | None, float | None], kind: Any) -> dict[str, Any]:
    values = {ours: tree.get(key, cap) for (ours, key), cap in zip(CAPS.items(), caps, strict=True)}
    scale = tree.get("query_pre_attn_scalar", 256) ** -0.5
    layers = shape.layers(tree, kind, 4096, turned=True)
    return values | dict(score_scale=scale) | layers | shape.biases(tree, llama.ALL_ATTENTION)


def _described(config: ModelConfig) -> dict[str, Any]:
    width = config.head_width if config.score_scale is None else config.score_scale**-2
    return (
        shape.described_biases(config, llama.ALL_ATTENTION)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.window or config.context}
        | {key: getattr(config, ours) for ours, key in CAPS.items()}
        | {"query_pre_attn_scalar": round(width) if abs(width - round(width)) < 1e-6 else width}
    )


def _second(i: int) -> str:
    return "full_attention" if i % 2 else "sliding_attention"


GEMMA2 = replace(
    llama.LLAMA,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    keys={
        **llama.LLAMA.keys,
        "head_dim": ("head_dim", 256),
        "kv_heads": ("num_key_value_heads", 4),
        "activation": ("hidden_activation", "gelu_pytorch_tanh"),
        "context": ("max_position_embeddings", 8192),
        "tied": ("tie_word_embeddings", True),
    },
    rules=rules,
    needs=dict(
        positions=("rope",),
        norm=("rmsnorm",),
        norm_order=("sandwich",),
        activation=("geglu_tanh", "geglu", "swiglu"),
        embed_scale=(True,),
        rope_fraction=(1.0,),
    ),
    constant=lambda config: _described(config) | shape.described_rope(config),
    shape=lambda tree: _read(tree, (50.0, 30.0), _second) | shape.rope(tree),
    covers=(*llama.LLAMA.covers, *CAPS, "score_scale", "pattern", "window"),
    read=f"{llama.LLAMA.read} query_pre_attn_scalar {' '.join(CAPS.values())}",
    unread="hidden_act",
    wrong=lambda tree: (),
    more=llama.of(llama.ALL_ATTENTION),
)


def read(tree: Json) -> dict[str, Any]:
    """Gemma 3's settings: layers with windows have a base of their own, and only the others are scaled."""
    every = tree.get("sliding_window_pattern", 6)
    common = _read(tree, (None, None), lambda i: "sliding_attention" if (i + 1) % every else "full_attention")
    both = shape.mapping(tree.get("rope_parameters"), "rope_parameters")
    full = dict(shape.mapping(both.get("full_attention"), "rope_parameters.full_attention"))
    full |= shape.mapping(tree.get("rope_scaling"), "rope_scaling")
    near = dict(shape.mapping(both.get("sliding_attention"), "rope_parameters.sliding_attention"))
    near.setdefault("rope_theta", tree.get("rope_local_base_freq", 10000.0))
    far = shape.rope(tree, 1e6, parameters=full)
    return common | far | shape.near(tree, near, far, common, 10000.0)


def described(config: ModelConfig) -> dict[str, Any]:
    """The keys that read() reads."""
    local = {"rope_local_base_freq": config.window_rope_base or config.rope_base}
    return _described(config) | {"rope_theta": config.rope_base, "rope_scaling": shape.scaling(config) or None} | local


GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    keys={**GEMMA2.keys, "context": ("max_position_embeddings", 131072)},
    needs={**GEMMA2.needs, "qk_norm": (True,), "score_cap": (None,)},
    constant=described,
    shape=read,
    covers=(*GEMMA2.covers, *shape.WINDOW_SETTINGS),
    read=f"{llama.LLAMA.read} query_pre_attn_scalar final_logit_softcapping rope_local_base_freq sliding_window_pattern "
    "_sliding_window_pattern",
    unread="hidden_act _sliding_window_pattern",
    fixed=dict(attn_logit_softcapping=(None,), use_bidirectional_attention=(False, None)),
    more=lambda config: [*shape.bias_obstacles(config, llama.ALL_ATTENTION), *shape.unscaled_windows(config)],
)
