"""transformers' classes that differ from Llama in norms, kinds of layers or the order of weights: OLMo, GLM, Phi, EXAONE, nanochat, ..."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import llama, shape
from hpclm.interop.huggingface.shape import Json
from hpclm.interop.rules import ConversionRule, absent, changed, in_one, neighbours, placements, reordered

OLMO_MODULES = {"post_norm1": "post_attention_layernorm", "post_norm2": "post_feedforward_layernorm"}
GLM4_MODULES = {
    "post_norm1": "post_self_attn_layernorm",
    "post_norm2": "post_mlp_layernorm",
    "mlp.up": "mlp.gate_up_proj",
}
PHI3_MODULES = {"mlp.up": "mlp.gate_up_proj", "attention.qkv": "self_attn.qkv_proj"}
NANOCHAT_MODULES = {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
HYPERCLOVAX_MODULES = {"post_norm1": "post_norm1", "post_norm2": "post_norm2"}
TURNED = {name: value for name, value in llama.LLAMA.constants.items() if name != "rope.fraction"}
"""Settings of classes that may rotate only a part of each head."""
GLM_BIASES = shape.biases("attention_bias", False, False)


def glm4_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of a GLM 4, which rotates pairs of neighbours."""
    rules = llama.rules(config, GLM4_MODULES)
    return changed(rules, ".attention.qkv.", partial(reordered, order=neighbours(config)))


def phi3_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of a Phi 3."""
    rules = llama.rules(config, PHI3_MODULES)
    return changed(rules, ".attention.qkv.", lambda rule: in_one(rule.ours, rule.theirs[0], config))


def nanochat_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of a nanochat, which has norms without weights. It rotates queries and keys in the opposite
    direction; swapping the halves of a head undoes that."""
    swapped = torch.arange(config.head_width).roll(config.head_width // 2)
    shapes = placements(config)
    for rule in changed(llama.rules(config, NANOCHAT_MODULES), ".attention.qkv.", partial(reordered, order=swapped)):
        if "norm" in rule.ours:
            rule = absent(rule.ours, shapes[rule.ours].shape, 1.0)
        yield rule


OLMO2 = replace(
    llama.LLAMA,
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    keys=llama.NARROW,
    rules=partial(llama.rules, more=OLMO_MODULES),
    constants={
        **llama.LLAMA.constants,
        "norm_order": "post",
        "attention.qk_norm": True,
        "attention.qk_norm_span": "projection",
    },
    parts=(shape.ROPE, shape.ATTENTION_BIASES),
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    parts=(shape.ROPE_BY_KIND, shape.ATTENTION_BIASES),
    newer=lambda config: any(rope.base != config.rope.base or rope.scaling for rope in config.rotates_in_windows),
)
GLM4 = replace(
    llama.LLAMA,
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    rules=glm4_rules,
    constants=TURNED | {"norm_order": "sandwich"},
    parts=(shape.ROPE, GLM_BIASES),
    write=lambda config: {"partial_rotary_factor": config.rope.fraction},
)


def read_nanochat(tree: Json) -> dict[str, Any]:
    """No setting. ConfigError for rotary positions that also multiply q and k: NanoChat's norms come after the rotation and undo that."""
    kind = tree["rope_parameters"].get("rope_type")
    if kind in ("yarn", "longrope"):
        raise ConfigError(
            f"rotary positions scaled by rope_type={kind}, which scales q and k after their norms in hpclm but before them in NanoChat"
        )
    return {}


NANOCHAT = replace(
    llama.LLAMA,
    architecture="NanoChatForCausalLM",
    model_type="nanochat",
    keys={**llama.NARROW, "logit_cap": "final_logit_softcapping"},
    rules=nanochat_rules,
    constants={**llama.LLAMA.constants, "embed_norm": True, "attention.qk_norm": True},
    parts=(shape.ROPE, shape.ATTENTION_BIASES),
    read=read_nanochat,
    activations=llama.SQUARED,
)


def read_exaone4(tree: Json) -> dict[str, Any]:
    """EXAONE 4's kinds of layers: if some have a window, the others have no positions."""
    kinds = shape.layers(tree, turned=True)
    if tree["sliding_window"] is not None:
        kinds["attention.pattern"] = ["nope" if kind == "full" else kind for kind in kinds["attention.pattern"]]
    return kinds


def write_exaone4(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_exaone4() reads."""
    return shape.layer_types(config, config.context if "nope" in config.attention.pattern else None)


EXAONE4 = replace(
    OLMO2,
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    keys=llama.LLAMA.keys,
    constants={**llama.LLAMA.constants, "norm_order": "post", "attention.qk_norm": True},
    parts=(shape.ROPE, shape.NO_BIASES),
    read=read_exaone4,
    write=write_exaone4,
)
HYPERCLOVAX = replace(
    llama.LLAMA,
    architecture="HyperCLOVAXForCausalLM",
    model_type="hyperclovax",
    keys={**llama.LLAMA.keys, **llama.MULTIPLIERS, "logit_multiplier": "logits_scaling"},
    rules=partial(llama.rules, more=HYPERCLOVAX_MODULES),
    read=lambda tree: dict(norm_order="sandwich" if tree["use_post_norm"] else "pre"),
    write=lambda config: dict(use_post_norm=config.norm_order == "sandwich"),
)
JAIS2 = replace(
    llama.ARCEE,
    architecture="Jais2ForCausalLM",
    model_type="jais2",
    keys={**llama.ARCEE.keys, "norm_eps": "layer_norm_eps"},
    constants={**llama.ARCEE.constants, "norm": "layernorm", "bias": True},
)


def read_granite_swa(tree: Json) -> dict[str, Any]:
    """Granite SWA's settings: each layer has a rotary base, where 0 means no positions."""
    kinds = shape.layers(tree, turned=True)
    pattern = kinds["attention.pattern"]
    with_positions = shape.with_positions(tree, pattern, "layer_rope_theta")
    of_kind: dict[str, set[float]] = {"full": set(), "window": set()}
    for number, base in enumerate(tree["layer_rope_theta"]):
        if base:
            of_kind[pattern[number % len(pattern)]].add(float(base))
    if any(len(bases) > 1 for bases in of_kind.values()):
        raise ConfigError("layer_rope_theta: layers with a window have different bases, or the others do")
    rope = shape.rope(tree)
    [near] = of_kind["window"] or [None]
    [base] = of_kind["full"] or [near or rope["rope.base"]]
    rope["rope.base"] = base
    if near:
        rope["rope.window_base"] = shape.other_base(near, base)
        rope["rope.window_scaled"] = bool(rope["rope.scaling"])
    return llama.GRANITE.read(tree) | rope | kinds | with_positions


def write_granite_swa(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_granite_swa() reads."""
    bases = [layer.rope.base if layer.rope else 0 for layer in config.blocks]
    keys = llama.GRANITE.write(config) | shape.described_rope(config) | shape.layer_types(config, config.context)
    return keys | {"layer_rope_theta": bases}


GRANITE_SWA = replace(
    llama.GRANITE,
    architecture="GraniteSWAForCausalLM",
    model_type="granite_swa",
    rules=partial(llama.rules, more={"attention": "self_attn"}),
    constants={**llama.LLAMA.constants, "attention.sinks": True},
    parts=(shape.ALL_BIASES,),
    read=read_granite_swa,
    write=write_granite_swa,
)
CWM = replace(
    llama.LLAMA,
    architecture="CwmForCausalLM",
    model_type="cwm",
    parts=(shape.STATED_ROPE, shape.biases(False, False, "mlp_bias"), shape.STATED_WINDOWS),
)
MINISTRAL = replace(
    llama.LLAMA,
    architecture="MinistralForCausalLM",
    model_type="ministral",
    parts=(shape.ROPE, shape.NO_BIASES, shape.WINDOWS),
)
INTERNLM3 = replace(llama.LLAMA, architecture="InternLM3ForCausalLM", model_type="internlm3")


def write_phi3(config: ModelConfig) -> dict[str, Any]:
    """The length that a Phi 3 states outside of rope_scaling."""
    name = "original_max_position_embeddings"
    return {name: shape.scaling(config).get(name, config.context)}


PHI3 = replace(
    llama.LLAMA,
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    keys={**llama.NARROW, "dropout": "resid_pdrop"},
    rules=phi3_rules,
    constants=TURNED,
    parts=(shape.ROPE, shape.NO_BIASES, shape.UNIFORM_WINDOWS, shape.ONE_DROPOUT),
    write=write_phi3,
    fixed=dict(attention_bias=(False,)),
)
ALL_FAMILIES = (OLMO2, OLMO3, GLM4, NANOCHAT, EXAONE4, HYPERCLOVAX, JAIS2, GRANITE_SWA, CWM, MINISTRAL, INTERNLM3)
"""All but Phi 3, which is tried last."""
