"""transformers' classes that combine features of Llama, Granite, OLMo and Gemma: windows, layers without positions, norms, sinks."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import gemma, llama, olmo, shape
from hpclm.interop.huggingface.family import Json
from hpclm.interop.rules import ConversionRule, changed, shifted

CWM_BIASES = (False, False, "mlp_bias")
CWM_SCALING = llama.APERTUS_SCALING | dict(rope_theta=1e6, factor=16.0)
WINDOWS = (*llama.LLAMA.covers, *shape.WINDOW_SETTINGS[:2])


def _first_of_four(i: int) -> str:
    return "sliding_attention" if i % 4 else "full_attention"


MINISTRAL = replace(
    llama.LLAMA,
    architecture="MinistralForCausalLM",
    model_type="ministral",
    constant=lambda config: (
        llama.described_llama(config, llama.NONE)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window}
    ),
    shape=lambda tree: llama.read_settings(tree, llama.NONE) | shape.layers(tree),
    covers=WINDOWS,
    unread="auto_map",
    wrong=lambda tree: (),
    more=lambda config: [*shape.bias_obstacles(config, llama.NONE), *shape.only(config, "full", "window")],
)
CWM = replace(
    MINISTRAL,
    architecture="CwmForCausalLM",
    model_type="cwm",
    constant=lambda config: (
        shape.described_biases(config, CWM_BIASES)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window or config.context}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope.base, **shape.scaling(config)}}
    ),
    shape=lambda tree: (
        llama.read_settings(shape.with_default_scaling(tree, CWM_SCALING), CWM_BIASES, 1e6)
        | shape.layers(tree, _first_of_four)
    ),
    unread="auto_map pretraining_tp",
    more=lambda config: [*shape.bias_obstacles(config, CWM_BIASES), *shape.only(config, "full", "window")],
)
INTERNLM3 = replace(
    llama.LLAMA,
    architecture="InternLM3ForCausalLM",
    model_type="internlm3",
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    unread="auto_map",
    wrong=lambda tree: [*llama.window_unread(tree), *_two_biases(tree)],
)


def _two_biases(tree: Json) -> Iterator[str]:
    """Biases of an InternLM 3 that transformers refuses."""
    attention, mlp = (
        tree.get(key, tree.get(old)) for key, old in (("attention_bias", "qkv_bias"), ("mlp_bias", "bias"))
    )
    if bool(attention) != bool(mlp):
        yield f"qkv_bias={attention} and bias={mlp}, but transformers reads one of them for both"


def exaone4(tree: Json) -> dict[str, Any]:
    """EXAONE 4's settings: if some layers have a window, the others have no positions."""
    every = tree.get("sliding_window_pattern", 4)
    window = tree.get("sliding_window", 4096)
    if not tree.get("layer_types") and (window is None or type(every) is not int or every < 1):
        raise ConfigError(
            f"sliding_window_pattern={every} and sliding_window={window} need layer_types, which config.json lacks"
        )
    kinds = shape.layers(tree, shape.full_every(every), turned=True)
    if window is not None:
        kinds["attention.pattern"] = ["nope" if kind == "full" else kind for kind in kinds["attention.pattern"]]
    return llama.read_settings(tree, llama.NONE) | kinds


def described_exaone4(config: ModelConfig) -> dict[str, Any]:
    """The keys that exaone4() reads."""
    window = config.attention.window
    if "nope" in config.attention.pattern:
        window = window or config.context
    types = {"layer_types": shape.layer_types(config), "sliding_window": window}
    return llama.described_llama(config, llama.NONE) | types


def more_exaone4(config: ModelConfig) -> Iterator[str]:
    """Reasons why an EXAONE 4 does not cover a network."""
    yield from shape.bias_obstacles(config, llama.NONE)
    if config.attention.pattern != ["full"]:
        yield from shape.only(config, "window", "nope")


EXAONE4 = replace(
    olmo.OLMO2,
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    keys=llama.LLAMA.keys,
    needs={**llama.LLAMA.needs, "norm_order": ("post",), "attention.qk_norm": (True,)},
    constant=described_exaone4,
    shape=exaone4,
    covers=WINDOWS,
    read=f"{llama.LLAMA.read} sliding_window_pattern",
    unread="auto_map",
    wrong=lambda tree: (),
    more=more_exaone4,
    width=True,
)
HYPERCLOVAX = replace(
    llama.GRANITE,
    architecture="HyperCLOVAXForCausalLM",
    model_type="hyperclovax",
    rules=partial(llama.rules, more={"post_norm1": "post_norm1", "post_norm2": "post_norm2"}),
    needs={**llama.LLAMA.needs, "norm_order": ("sandwich", "pre")},
    constant=lambda config: (
        llama.described_llama(config)
        | dict(
            use_post_norm=config.norm_order == "sandwich",
            logits_scaling=config.logit_multiplier,
            attention_multiplier=config.attention.score_scale or config.head_width**-0.5,
        )
    ),
    shape=lambda tree: (
        llama.read_settings(tree)
        | dict(
            norm_order="sandwich" if tree.get("use_post_norm", True) else "pre",
            logit_multiplier=tree.get("logits_scaling", 1.0),
        )
    ),
    read=f"{llama.GRANITE.read} use_post_norm",
    unread="auto_map pretraining_tp",
)
JAIS2 = replace(
    llama.ARCEE,
    architecture="Jais2ForCausalLM",
    model_type="jais2",
    keys={**llama.ARCEE.keys, "norm_eps": "layer_norm_eps"},
    needs={**llama.ARCEE.needs, "norm": ("layernorm",), "bias": (True,)},
    fixed=dict(attention_bias=(True,), mlp_bias=(True,)),
    unread="auto_map",
)


def vault_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of a VaultGemma."""
    return changed(llama.rules(config, {"norm2": "pre_feedforward_layernorm"}), "norm", shifted)


VAULTGEMMA = replace(
    gemma.GEMMA2,
    architecture="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    rules=vault_rules,
    needs={**gemma.GEMMA2.needs, "norm_order": ("pre",)},
    unread="hidden_act auto_map",
)


def granite_swa(tree: Json) -> dict[str, Any]:
    """Granite SWA's settings: each layer has a rotary base, where 0 means no positions."""
    common = llama.read_settings(tree)
    kinds = shape.layers(tree, _first_of_four, turned=True)
    count = tree["num_hidden_layers"]
    bases = tree.get("layer_rope_theta") or [common["rope.base"]] * count
    if not isinstance(bases, list) or len(bases) != count:
        raise ConfigError(f"layer_rope_theta={bases} must be a list with a base for each of {count} layers")
    layer_bases = [
        (kinds["attention.pattern"][i % len(kinds["attention.pattern"])], base) for i, base in enumerate(bases)
    ]
    of_kind = {kind: {base for other, base in layer_bases if base and other == kind} for kind in ("full", "window")}
    if any(len(values) > 1 for values in of_kind.values()):
        raise ConfigError("layer_rope_theta: layers with a window have different bases, or the others do")
    full, near = (next(iter(of_kind[kind]), None) for kind in ("full", "window"))
    without = {"full": "nope", "window": "window_nope"}
    common["rope.base"] = float(full or near or common["rope.base"])
    if near:
        common["rope.window_base"] = shape.other_base(float(near), common["rope.base"])
        common["rope.window_scaled"] = bool(common["rope.scaling"])
    return common | {
        **kinds,
        "logit_multiplier": 1 / shape.number(tree, "logits_scaling"),
        "attention.sinks": True,
        "attention.pattern": shape.period([kind if base else without[kind] for kind, base in layer_bases]),
    }


def described_granite_swa(config: ModelConfig) -> dict[str, Any]:
    """The keys that granite_swa() reads."""
    return (
        llama.GRANITE.constant(config)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window or config.context}
        | {"layer_rope_theta": [layer.rope.base if layer.rope else 0 for layer in config.blocks]}
    )


def more_granite_swa(config: ModelConfig) -> Iterator[str]:
    """Reasons why a Granite SWA does not cover a network."""
    yield from shape.bias_obstacles(config, llama.ALL)
    if "window" in config.attention.pattern and config.rope.scaling and not config.rope.window_scaled:
        yield "model.rope.window_scaled=false, but it scales all layers"


GRANITE_SWA = replace(
    llama.GRANITE,
    architecture="GraniteSWAForCausalLM",
    model_type="granite_swa",
    rules=partial(llama.rules, more={"attention": "self_attn"}),
    needs={**llama.LLAMA.needs, "attention.sinks": (True,)},
    constant=described_granite_swa,
    shape=granite_swa,
    covers=(*llama.GRANITE.covers, *shape.WINDOW_SETTINGS),
    read=f"{llama.GRANITE.read} layer_rope_theta",
    unread="auto_map",
    wrong=lambda tree: (),
    more=more_granite_swa,
)
ALL_FAMILIES = (EXAONE4, HYPERCLOVAX, JAIS2, VAULTGEMMA, GRANITE_SWA, CWM, MINISTRAL, INTERNLM3)
