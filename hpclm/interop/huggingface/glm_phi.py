"""transformers' Glm4ForCausalLM and Phi3ForCausalLM, which keep gate and up projection in one tensor."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import llama, shape
from hpclm.interop.huggingface.family import Json
from hpclm.interop.rules import ConversionRule, changed, in_one, reordered

GLM4_MODULES = {
    "post_norm1": "post_self_attn_layernorm",
    "post_norm2": "post_mlp_layernorm",
    "mlp.up": "mlp.gate_up_proj",
}
GLM4_BIASES = ("attention_bias", False, False)
PHI3_MODULES = {"mlp.up": "mlp.gate_up_proj", "attention.qkv": "self_attn.qkv_proj"}
TURNED = {name: values for name, values in llama.LLAMA.needs.items() if name != "rope.fraction"}
"""Requirements of both classes, which may rotate only a part of each head."""


def interleaved(config: ModelConfig) -> torch.Tensor:
    """For each feature of our heads, its index in a GLM's head. A GLM rotates pairs of neighbours, hpclm pairs from the two halves."""
    return torch.cat([pairs(config.rotated), torch.arange(config.rotated, config.head_width)])


def pairs(count: int) -> torch.Tensor:
    """For each of our ``count`` rotated features, its index in a class that rotates pairs of neighbours."""
    return torch.arange(count).view(-1, 2).t().flatten()


def glm4_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of a GLM 4."""
    rules = llama.rules(config, GLM4_MODULES)
    return changed(rules, ".attention.qkv.", partial(reordered, order=interleaved(config)))


def phi3_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of a Phi 3."""
    rules = llama.rules(config, PHI3_MODULES)
    return changed(rules, ".attention.qkv.", lambda rule: in_one(rule.ours, rule.theirs[0], config))


GLM4 = replace(
    llama.LLAMA,
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    rules=glm4_rules,
    needs=TURNED | {"norm_order": ("sandwich",)},
    constant=lambda config: (
        llama.described_llama(config, GLM4_BIASES) | {"partial_rotary_factor": config.rope.fraction}
    ),
    shape=lambda tree: llama.read_settings(tree, GLM4_BIASES),
    more=llama.bias_reasons(GLM4_BIASES),
)


def phi3(tree: Json) -> dict[str, Any]:
    """Settings that depend on several keys; Phi 3 has one scaling under three names."""
    tree = dict(tree)
    for key in ("rope_scaling", "rope_parameters"):
        given = shape.mapping(tree.get(key), key)
        if given.get("rope_type", given.get("type")) in ("su", "yarn"):
            tree[key] = {**given, "rope_type": "longrope"}
    window = shape.layers({**tree, "layer_types": None})
    settings = llama.read_settings(tree, llama.NONE)
    kind = settings["rope.scaling"].get("rope_type")
    if kind not in (None, "longrope"):
        raise ConfigError(f"rope_type={kind}, but Phi3ForCausalLM supports only longrope")
    return settings | window | dict(dropout=tree["resid_pdrop"])


def described_phi3(config: ModelConfig) -> dict[str, Any]:
    """The keys that phi3() reads."""
    original = shape.scaling(config).get("original_max_position_embeddings", config.context)
    return llama.described_llama(config, llama.NONE) | dict(
        sliding_window=config.attention.window,
        original_max_position_embeddings=original,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
    )


def wrong_phi3(tree: Json) -> Iterator[str]:
    """transformers 5 does not apply embd_pdrop, so its dropout may differ from ours."""
    if tree["embd_pdrop"] != tree["resid_pdrop"]:
        yield "embd_pdrop and resid_pdrop differ, but hpclm has one model.dropout for both"


def more_phi3(config: ModelConfig) -> Iterator[str]:
    """Reasons why a Phi 3 does not cover a network."""
    yield from shape.bias_obstacles(config, llama.NONE)
    kind = config.rope.scaling.get("rope_type")
    if kind not in (None, "longrope") or (kind is None and config.rope.fraction == 1.0):
        yield f"model.rope.scaling.rope_type={kind or 'null'}, but it needs longrope"


PHI3 = replace(
    llama.LLAMA,
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    keys=llama.NARROW,
    rules=phi3_rules,
    needs=TURNED | {"attention.pattern": (["full"], ["window"])},
    constant=described_phi3,
    shape=phi3,
    covers=(*llama.LLAMA.covers, "attention.window"),
    read=f"{llama.LLAMA.read} resid_pdrop embd_pdrop",
    fixed=dict(attention_bias=(False,)),
    wrong=wrong_phi3,
    more=more_phi3,
    width=False,
)
