"""transformers' LlamaForCausalLM, and classes that differ in biases, norms of q and k, windows, multipliers or activation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import shape
from hpclm.interop.huggingface.family import Family
from hpclm.interop.huggingface.shape import Json
from hpclm.interop.rules import ConversionRule, of_modules

ALWAYS = {
    "tokens": "model.embed_tokens",
    "norm1": "input_layernorm",
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "mlp.down": "mlp.down_proj",
    "mlp.activation": "mlp.act_fn",
    "norm": "model.norm",
    "output": "lm_head",
}
LAYER = "model.layers.{}."
SILU = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
SQUARED = {"relu2": "relu2"}


def modules(config: ModelConfig, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Maps our modules to theirs. ``more``: the modules where a class differs."""
    modules: dict[str, Any] = {**ALWAYS, "mlp.up": "mlp.up_proj"}
    if config.gated:
        modules["mlp.up"] = ("mlp.gate_proj", "mlp.up_proj")
    return modules | dict(more or {})


def rules(config: ModelConfig, more: Mapping[str, Any] | None = None) -> Iterable[ConversionRule]:
    """The conversion rule of each weight."""
    return of_modules(config, modules(config, more), LAYER)


def read_no_rope(tree: Json) -> dict[str, Any]:
    """SmolLM 3's settings: some layers have no positions."""
    layers = shape.layers(tree)
    return layers | shape.with_positions(tree, layers["attention.pattern"], "no_rope_layers")


def write_no_rope(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_no_rope() reads."""
    turned = [int(layer.rope is not None) for layer in config.blocks]
    return shape.SWITCHED_WINDOWS.write(config) | {"no_rope_layers": turned}


LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    keys={
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "attention.heads": "num_attention_heads",
        "attention.head_dim": "head_dim",
        "attention.kv_heads": "num_key_value_heads",
        "ffn": "intermediate_size",
        "context": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "activation": "hidden_act",
        "attention.dropout": "attention_dropout",
    },
    rules=rules,
    prefix="model.",
    constants={"positions": "rope", "norm": "rmsnorm", "rope.fraction": 1.0},
    parts=(shape.ROPE, shape.ALL_BIASES),
    activations=SILU,
    buffers=(".rotary_emb.inv_freq",),
)
NARROW = {name: key for name, key in LLAMA.keys.items() if name != "attention.head_dim"}
"""Keys of classes with heads of width hidden / heads."""
MISTRAL = replace(
    LLAMA,
    architecture="MistralForCausalLM",
    model_type="mistral",
    parts=(shape.ROPE, shape.NO_BIASES, shape.UNIFORM_WINDOWS),
)
QWEN2 = replace(
    LLAMA,
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    keys=NARROW,
    parts=(shape.ROPE, shape.biases(True, False, False), shape.SWITCHED_WINDOWS),
)
QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    constants={**LLAMA.constants, "attention.qk_norm": True},
    parts=(shape.ROPE, shape.ATTENTION_BIASES, shape.SWITCHED_WINDOWS),
)
SMOLLM3 = replace(
    LLAMA, architecture="SmolLM3ForCausalLM", model_type="smollm3", read=read_no_rope, write=write_no_rope
)
MULTIPLIERS = {
    "embed_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention.score_scale": "attention_multiplier",
}
GRANITE = replace(
    LLAMA,
    architecture="GraniteForCausalLM",
    model_type="granite",
    keys={**LLAMA.keys, **MULTIPLIERS},
    read=lambda tree: dict(logit_multiplier=1 / shape.number(tree, "logits_scaling")),
    write=lambda config: dict(logits_scaling=1 / config.logit_multiplier),
)
ARCEE = replace(LLAMA, architecture="ArceeForCausalLM", model_type="arcee", activations=SQUARED)
SEED_OSS = replace(
    LLAMA,
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    keys={**LLAMA.keys, "dropout": "residual_dropout"},
    parts=(shape.ROPE, shape.biases("attention_bias", "attention_out_bias", "mlp_bias")),
)
APERTUS_MODULES = {"norm1": "attention_layernorm", "norm2": "feedforward_layernorm"}
# xIELU in every Apertus: the slope at 0, and where the exponential is clamped
BETA = 0.5
EPS = -1e-6


def apertus_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight. transformers' class also stores two constants as weights, which it does not set itself."""
    for rule in rules(config, APERTUS_MODULES):
        if not rule.ours.endswith(".alpha_n"):
            yield rule
            continue
        [name] = rule.theirs
        theirs = (name, name.replace("alpha_n", "beta"), name.replace("alpha_n", "eps"))
        yield replace(rule, theirs=theirs, split=lambda x: [x, torch.tensor(BETA), torch.tensor(EPS)], join=_alpha)


def _alpha(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    alpha, beta, eps = tensors
    if beta.item() != BETA or abs(eps.item() - EPS) > 1e-8:
        raise ConfigError(f"xIELU with beta={beta.item():g} and eps={eps.item():g}; hpclm has {BETA} and {EPS}")
    return alpha


APERTUS = replace(
    LLAMA,
    architecture="ApertusForCausalLM",
    model_type="apertus",
    rules=apertus_rules,
    constants={**LLAMA.constants, "attention.qk_norm": True},
    parts=(shape.STATED_ROPE, shape.ATTENTION_BIASES),
    activations={"xielu": "xielu"},
)
ALL_FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GRANITE, ARCEE, SEED_OSS, APERTUS)
