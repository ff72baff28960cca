"""transformers' Glm4ForCausalLM and Phi3ForCausalLM, which keep gate and up projection in one tensor."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import llama, shape
from hpclm.interop.huggingface.completion import Keys
from hpclm.interop.rules import ConversionRule, changed, in_one, reordered

GLM4_MODULES = {
    "post_norm1": "post_self_attn_layernorm",
    "post_norm2": "post_mlp_layernorm",
    "mlp.up": "mlp.gate_up_proj",
}
GLM4_BIASES = ("attention_bias", False, False)
PHI3_MODULES = {"mlp.up": "mlp.gate_up_proj", "attention.qkv": "self_attn.qkv_proj"}
TURNED = {name: value for name, value in llama.LLAMA.constants.items() if name != "rope.fraction"}
"""Settings of both classes, which may rotate only a part of each head."""


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
    constants=TURNED | {"norm_order": "sandwich"},
    write=lambda config: llama.write_llama(config, GLM4_BIASES) | {"partial_rotary_factor": config.rope.fraction},
    read=partial(llama.read_llama, biases=GLM4_BIASES),
)


def read_phi3(tree: Keys) -> dict[str, Any]:
    """Settings that depend on several keys. transformers 5 does not apply embd_pdrop, so its dropout may differ from ours."""
    if tree["embd_pdrop"] != tree["resid_pdrop"]:
        raise ConfigError("embd_pdrop and resid_pdrop differ, but hpclm has one model.dropout for both")
    return llama.read_windowed(tree, llama.NONE, uniform=True)


def write_phi3(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_phi3() reads."""
    original = shape.scaling(config).get("original_max_position_embeddings", config.context)
    return llama.write_llama(config, llama.NONE) | dict(
        sliding_window=config.attention.window,
        original_max_position_embeddings=original,
        embd_pdrop=config.dropout,
    )


PHI3 = replace(
    llama.LLAMA,
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    keys={**llama.NARROW, "dropout": "resid_pdrop"},
    rules=phi3_rules,
    constants=TURNED,
    write=write_phi3,
    read=read_phi3,
    fixed=dict(attention_bias=(False,)),
)
