"""transformers' classes that combine features of Llama, Granite, OLMo and Gemma: windows, layers without positions, norms, sinks."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import gemma, llama, olmo, shape
from hpclm.interop.huggingface.completion import Keys
from hpclm.interop.rules import ConversionRule, changed, shifted

CWM_BIASES = (False, False, "mlp_bias")


MINISTRAL = replace(
    llama.LLAMA,
    architecture="MinistralForCausalLM",
    model_type="ministral",
    write=lambda config: (
        llama.write_llama(config, llama.NONE)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window}
    ),
    read=partial(llama.read_windowed, biases=llama.NONE),
)
CWM = replace(
    MINISTRAL,
    architecture="CwmForCausalLM",
    model_type="cwm",
    write=lambda config: (
        llama.write_llama(config, CWM_BIASES)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window or config.context}
        | shape.described_parameters(config)
    ),
    read=partial(llama.read_windowed, biases=CWM_BIASES),
)
INTERNLM3 = replace(llama.LLAMA, architecture="InternLM3ForCausalLM", model_type="internlm3")


def read_exaone4(tree: Keys) -> dict[str, Any]:
    """EXAONE 4's settings: if some layers have a window, the others have no positions."""
    kinds = shape.layers(tree, turned=True)
    if tree["sliding_window"] is not None:
        kinds["attention.pattern"] = ["nope" if kind == "full" else kind for kind in kinds["attention.pattern"]]
    return llama.read_llama(tree, llama.NONE) | kinds


def write_exaone4(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_exaone4() reads."""
    window = config.attention.window
    if "nope" in config.attention.pattern:
        window = window or config.context
    types = {"layer_types": shape.layer_types(config), "sliding_window": window}
    return llama.write_llama(config, llama.NONE) | types


EXAONE4 = replace(
    olmo.OLMO2,
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    keys=llama.LLAMA.keys,
    constants={**llama.LLAMA.constants, "norm_order": "post", "attention.qk_norm": True},
    write=write_exaone4,
    read=read_exaone4,
)
HYPERCLOVAX = replace(
    llama.GRANITE,
    architecture="HyperCLOVAXForCausalLM",
    model_type="hyperclovax",
    keys={**llama.GRANITE.keys, "logit_multiplier": "logits_scaling"},
    rules=partial(llama.rules, more={"post_norm1": "post_norm1", "post_norm2": "post_norm2"}),
    write=lambda config: llama.write_llama(config) | dict(use_post_norm=config.norm_order == "sandwich"),
    read=lambda tree: llama.read_llama(tree) | dict(norm_order="sandwich" if tree["use_post_norm"] else "pre"),
)
JAIS2 = replace(
    llama.ARCEE,
    architecture="Jais2ForCausalLM",
    model_type="jais2",
    keys={**llama.ARCEE.keys, "norm_eps": "layer_norm_eps"},
    constants={**llama.ARCEE.constants, "norm": "layernorm", "bias": True},
)


def vault_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of a VaultGemma."""
    return changed(llama.rules(config, {"norm2": "pre_feedforward_layernorm"}), "norm", shifted)


VAULTGEMMA = replace(
    gemma.GEMMA2,
    architecture="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    rules=vault_rules,
    constants={**gemma.GEMMA2.constants, "norm_order": "pre"},
)


def read_granite_swa(tree: Keys) -> dict[str, Any]:
    """Granite SWA's settings: each layer has a rotary base, where 0 means no positions."""
    common = llama.GRANITE.read(tree)
    kinds = shape.layers(tree, turned=True)
    count = tree["num_hidden_layers"]
    bases = tree["layer_rope_theta"]
    if len(bases) != count:
        raise ConfigError(f"layer_rope_theta={bases} must be a list with a base for each of {count} layers")
    pattern = kinds["attention.pattern"]
    layer_bases = [(pattern[i % len(pattern)], base) for i, base in enumerate(bases)]
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
        "attention.pattern": shape.period([kind if base else without[kind] for kind, base in layer_bases]),
    }


def write_granite_swa(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_granite_swa() reads."""
    return (
        llama.GRANITE.write(config)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window or config.context}
        | {"layer_rope_theta": [layer.rope.base if layer.rope else 0 for layer in config.blocks]}
    )


GRANITE_SWA = replace(
    llama.GRANITE,
    architecture="GraniteSWAForCausalLM",
    model_type="granite_swa",
    rules=partial(llama.rules, more={"attention": "self_attn"}),
    constants={**llama.LLAMA.constants, "attention.sinks": True},
    write=write_granite_swa,
    read=read_granite_swa,
)
ALL_FAMILIES = (EXAONE4, HYPERCLOVAX, JAIS2, VAULTGEMMA, GRANITE_SWA, CWM, MINISTRAL, INTERNLM3)
