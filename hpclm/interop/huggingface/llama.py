"""transformers' LlamaForCausalLM, and classes that differ in biases, norms of q and k, windows, multipliers or activation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import shape
from hpclm.interop.huggingface.completion import Keys
from hpclm.interop.huggingface.family import Family
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
ALL_ATTENTION = ("attention_bias", "attention_bias", False)
ALL = ("attention_bias", "attention_bias", "mlp_bias")
NONE = (False, False, False)
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


def read_llama(tree: Keys, biases: Sequence[str | bool] = ALL) -> dict[str, Any]:
    """Settings that depend on several keys."""
    return shape.rope(tree) | shape.biases(tree, biases)


def write_llama(config: ModelConfig, biases: Sequence[str | bool] = ALL) -> dict[str, Any]:
    """The keys that read_llama() reads."""
    return shape.described_rope(config) | shape.described_biases(config, biases)


def read_windowed(tree: Keys, biases: Sequence[str | bool], uniform: bool = False) -> dict[str, Any]:
    """Settings of a class with windows; ``uniform``: in all layers or none."""
    return read_llama(tree, biases) | shape.layers(tree, uniform=uniform)


def read_no_rope(tree: Keys) -> dict[str, Any]:
    """SmolLM 3's settings: some layers have no positions."""
    turned = tree["no_rope_layers"]
    count = tree["num_hidden_layers"]
    if len(turned) != count:
        raise ConfigError(f"no_rope_layers={turned} must be a list with a number for each of {count} layers")
    layers = shape.layers(tree)
    pattern = layers["attention.pattern"]
    kinds = [pattern[i % len(pattern)] for i in range(count)]
    names = {("full", False): "nope", ("window", False): "window_nope"}
    pattern = shape.period([names.get((k, bool(t)), k) for k, t in zip(kinds, turned, strict=True)])
    return read_llama(tree) | layers | {"attention.pattern": pattern}


def write_no_rope(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_no_rope() reads."""
    turned = [int(layer.rope is not None) for layer in config.blocks]
    return write_llama(config) | shape.described_layers(config) | {"no_rope_layers": turned}


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
    read=read_llama,
    write=write_llama,
    activations=SILU,
    buffers=(".rotary_emb.inv_freq",),
)


NARROW = {name: key for name, key in LLAMA.keys.items() if name != "attention.head_dim"}
"""Keys of classes with heads of width hidden / heads."""
MISTRAL = replace(
    LLAMA,
    architecture="MistralForCausalLM",
    model_type="mistral",
    write=lambda config: write_llama(config, NONE) | {"sliding_window": config.attention.window},
    read=partial(read_windowed, biases=NONE, uniform=True),
)
QWEN2_BIASES = (True, False, False)


def write_qwen(config: ModelConfig, biases: Sequence[str | bool]) -> dict[str, Any]:
    """The keys of a Qwen 2 or 3."""
    return write_llama(config, biases) | shape.described_layers(config) | {"max_window_layers": 0}


QWEN2 = replace(
    LLAMA,
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    keys=NARROW,
    write=partial(write_qwen, biases=QWEN2_BIASES),
    read=partial(read_windowed, biases=QWEN2_BIASES),
)
QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    constants={**LLAMA.constants, "attention.qk_norm": True},
    write=partial(write_qwen, biases=ALL_ATTENTION),
    read=partial(read_windowed, biases=ALL_ATTENTION),
)
SMOLLM3 = replace(
    LLAMA,
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    write=write_no_rope,
    read=read_no_rope,
)
GRANITE = replace(
    LLAMA,
    architecture="GraniteForCausalLM",
    model_type="granite",
    keys={
        **LLAMA.keys,
        "embed_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
        "attention.score_scale": "attention_multiplier",
    },
    write=lambda config: write_llama(config) | dict(logits_scaling=1 / config.logit_multiplier),
    read=lambda tree: read_llama(tree) | dict(logit_multiplier=1 / shape.number(tree, "logits_scaling")),
)
ARCEE = replace(LLAMA, architecture="ArceeForCausalLM", model_type="arcee", activations=SQUARED)
SEED_BIASES = ("attention_bias", "attention_out_bias", "mlp_bias")
SEED_OSS = replace(
    LLAMA,
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    keys={**LLAMA.keys, "dropout": "residual_dropout"},
    write=partial(write_llama, biases=SEED_BIASES),
    read=partial(read_llama, biases=SEED_BIASES),
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
    write=lambda config: write_llama(config, ALL_ATTENTION) | shape.described_parameters(config),
    read=partial(read_llama, biases=ALL_ATTENTION),
    activations={"xielu": "xielu"},
)
ALL_FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GRANITE, ARCEE, SEED_OSS, APERTUS)
