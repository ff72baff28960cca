"""transformers' LlamaForCausalLM, and classes that differ in biases, norms of q and k, windows, multipliers or activation."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import shape
from hpclm.interop.huggingface.family import Family, Json
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


def read_settings(tree: Json, biases: Sequence[str | bool] = ALL, theta: float = 10000.0) -> dict[str, Any]:
    """Settings that depend on several keys."""
    return shape.rope(tree, theta) | shape.biases(tree, biases)


def windowed(tree: Json, biases: Sequence[str | bool], **given: Any) -> dict[str, Any]:
    """read_settings() for a class with windows. ``given``: see shape.layers()."""
    return read_settings(tree, biases) | shape.layers(tree, **given)


def described_llama(config: ModelConfig, biases: Sequence[str | bool] = ALL) -> dict[str, Any]:
    """The keys that read_settings() reads."""
    return shape.described_rope(config) | shape.described_biases(config, biases)


def last_windowed(tree: Json) -> dict[str, Any]:
    """Qwen 2's and 3's layers with a window: those from max_window_layers on, if use_sliding_window is set."""
    return shape.layers(tree, last_layers(tree), switched=True)


def last_layers(tree: Json) -> Callable[[int], str]:
    """Returns a function that gives a layer's kind: a window from max_window_layers on, full attention before."""
    first = tree["max_window_layers"]
    if type(first) is not int:
        raise ConfigError(f"max_window_layers={first} must be a whole number")
    return lambda i: "sliding_attention" if i >= first else "full_attention"


def no_rope(tree: Json) -> dict[str, Any]:
    """SmolLM 3's settings: some layers have no positions, and only these have a window."""
    count = shape.whole(tree, "num_hidden_layers")
    every = int(shape.number(tree, "no_rope_layer_interval"))
    turned = tree.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    if not isinstance(turned, list) or len(turned) != count:
        raise ConfigError(f"no_rope_layers={turned} must be a list with a number for each of {count} layers")
    kind: Any = lambda i: "full_attention" if turned[i] else "sliding_attention"  # noqa: E731
    layers = shape.layers(tree, kind, switched=True)
    kinds = [layers["attention.pattern"][i % len(layers["attention.pattern"])] for i in range(count)]
    names = {("full", False): "nope", ("window", False): "window_nope"}
    return layers | {
        "attention.pattern": shape.period([names.get((k, bool(t)), k) for k, t in zip(kinds, turned, strict=True)])
    }


def described_no_rope(config: ModelConfig) -> dict[str, Any]:
    """The keys that no_rope() reads."""
    turned = [int(layer.rope is not None) for layer in config.blocks]
    return shape.described_layers(config) | {"no_rope_layers": turned}


def bias_reasons(biases: Sequence[str | bool]) -> Any:
    """Returns a function that gives the reasons why a class with these bias keys does not cover a network."""
    return partial(shape.bias_obstacles, keys=biases)


def window_unread(tree: Json) -> Iterator[str]:
    """Errors for keys that ask for windows in a class without windows."""
    if set(tree.get("layer_types") or []) - {"full_attention"}:
        yield f"layer_types={tree['layer_types']}, but this class has full attention in all layers"
    window = tree.get("sliding_window")
    context = tree["max_position_embeddings"]
    on = window and tree.get("use_sliding_window", True)
    if on and not (isinstance(window, int) and isinstance(context, int) and window >= context):
        yield f"sliding_window={window}, but this class has full attention in all layers"


def other_layers(tree: Json) -> Iterator[str]:
    """Errors for layer_types in a class with a single kind of layer, if they name another kind."""
    kind = "full_attention" if tree["sliding_window"] is None else "sliding_attention"
    if set(tree.get("layer_types") or []) - {kind}:
        yield f"layer_types={tree['layer_types']}, but with sliding_window={tree['sliding_window']} this class has {kind} in all layers"


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
        "tied": "tie_word_embeddings",
    },
    rules=rules,
    prefix="model.",
    needs={
        "positions": ("rope",),
        "norm": ("rmsnorm",),
        "activation": ("swiglu", "geglu", "geglu_tanh"),
        "rope.fraction": (1.0,),
    },
    constant=described_llama,
    shape=read_settings,
    covers=(*shape.ROPE_SETTINGS, *shape.BIASES, "bias"),
    activations=SILU,
    grouped=True,
    width=True,
    buffers=(".rotary_emb.inv_freq",),
    read=f"{shape.ROPE} {shape.LAYERS} attention_bias mlp_bias",
    unread="pretraining_tp max_window_layers",
    wrong=window_unread,
    more=bias_reasons(ALL),
)


NARROW = {name: key for name, key in LLAMA.keys.items() if name != "attention.head_dim"}
"""Keys of classes with heads of width hidden / heads."""
WINDOWED = replace(LLAMA, covers=(*LLAMA.covers, *shape.WINDOW_SETTINGS[:2]), wrong=lambda tree: (), unread="")
MISTRAL = replace(
    WINDOWED,
    architecture="MistralForCausalLM",
    model_type="mistral",
    needs={**LLAMA.needs, "attention.pattern": (["window"], ["full"])},
    constant=lambda config: described_llama(config, NONE) | {"sliding_window": config.attention.window},
    shape=lambda tree: windowed({**tree, "layer_types": None}, NONE),
    wrong=other_layers,
    more=bias_reasons(NONE),
)
QWEN2_BIASES = (True, False, False)
QWEN2 = replace(
    WINDOWED,
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    keys=NARROW,
    constant=lambda config: (
        described_llama(config, QWEN2_BIASES) | shape.described_layers(config) | {"max_window_layers": 0}
    ),
    shape=lambda tree: read_settings(tree, QWEN2_BIASES) | last_windowed(tree),
    read=f"{LLAMA.read} max_window_layers",
    more=bias_reasons(QWEN2_BIASES),
    width=False,
)
QWEN3 = replace(
    QWEN2,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    keys=LLAMA.keys,
    needs={**LLAMA.needs, "attention.qk_norm": (True,)},
    constant=lambda config: (
        described_llama(config, ALL_ATTENTION) | shape.described_layers(config) | {"max_window_layers": 0}
    ),
    shape=lambda tree: read_settings(tree, ALL_ATTENTION) | last_windowed(tree),
    more=bias_reasons(ALL_ATTENTION),
    width=True,
)
SMOLLM3 = replace(
    WINDOWED,
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    constant=lambda config: described_llama(config) | described_no_rope(config),
    shape=lambda tree: read_settings(tree, theta=2e6) | no_rope(tree),
    read=f"{LLAMA.read} no_rope_layers no_rope_layer_interval",
    unread="pretraining_tp max_window_layers",
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
    constant=lambda config: (
        described_llama(config)
        | dict(
            logits_scaling=1 / config.logit_multiplier,
            attention_multiplier=config.attention.score_scale or config.head_width**-0.5,
        )
    ),
    shape=lambda tree: read_settings(tree) | dict(logit_multiplier=1 / shape.number(tree, "logits_scaling")),
    covers=(*LLAMA.covers, "logit_multiplier"),
    read=f"{LLAMA.read} logits_scaling",
)
ARCEE = replace(
    LLAMA,
    architecture="ArceeForCausalLM",
    model_type="arcee",
    needs={**LLAMA.needs, "activation": ("relu2",)},
    activations=SQUARED,
)
SEED_BIASES = ("attention_bias", "attention_out_bias", "mlp_bias")
SEED_OSS = replace(
    LLAMA,
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    constant=lambda config: described_llama(config, SEED_BIASES) | dict(residual_dropout=config.dropout),
    shape=lambda tree: read_settings(tree, SEED_BIASES) | dict(dropout=tree["residual_dropout"]),
    covers=(*LLAMA.covers, "dropout"),
    read=f"{LLAMA.read} attention_out_bias residual_dropout",
    more=bias_reasons(SEED_BIASES),
)
APERTUS_SCALING = dict(
    rope_type="llama3",
    rope_theta=12e6,
    factor=8.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
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
    needs={**LLAMA.needs, "activation": ("xielu",), "attention.qk_norm": (True,)},
    constant=lambda config: (
        described_llama(config, ALL_ATTENTION)
        | {"rope_parameters": {"rope_type": "default", **shape.scaling(config), "rope_theta": config.rope.base}}
    ),
    shape=lambda tree: read_settings(shape.with_default_scaling(tree, APERTUS_SCALING), ALL_ATTENTION, 12e6),
    activations={"xielu": "xielu"},
    more=bias_reasons(ALL_ATTENTION),
)
ALL_FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GRANITE, ARCEE, SEED_OSS, APERTUS)
