"""transformers' DeepseekV2ForCausalLM, DeepseekV3ForCausalLM and Glm4MoeLiteForCausalLM: multi-head latent attention."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.rope import parsed
from hpclm.interop.huggingface import expert_weights, llama, mixtures, shape
from hpclm.interop.huggingface.family import Family
from hpclm.interop.huggingface.shape import Json, Part
from hpclm.interop.rules import ConversionRule, changed, pairs, rows_reordered
from hpclm.model.position import mscale

MODULES = {
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_b": "self_attn.q_b_proj",
    "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b": "self_attn.kv_b_proj",
}
KEYS = {
    **{ours: key for ours, key in llama.LLAMA.keys.items() if ours != "attention.kv_heads"},
    "attention.head_dim": "qk_nope_head_dim",
    "attention.latent.kv_rank": "kv_lora_rank",
    "attention.latent.q_rank": "q_lora_rank",
    "attention.latent.rope_dim": "qk_rope_head_dim",
    "attention.latent.value_dim": "v_head_dim",
}
CONSTANTS = {**llama.LLAMA.constants, "attention.latent.norm_eps": 1e-6}


def rules(config: ModelConfig, interleave: bool = True) -> Iterable[ConversionRule]:
    """The conversion rule of each weight. ``interleave``: the class rotates pairs of neighbours, hpclm pairs from the two halves."""
    latent = config.attention.latent
    modules = MODULES
    if latent.q_rank is None:
        modules = MODULES | {"attention.q_b": "self_attn.q_proj"}
    rules = expert_weights.rules(config, more=modules)
    if not interleave:
        return rules
    for part, first in {".attention.q_b.": config.head_dim, ".attention.kv_a.": latent.kv_rank}.items():
        order = torch.cat([torch.arange(first), first + pairs(latent.rope_dim)])
        rules = changed(rules, part, partial(rows_reordered, order=order))
    return rules


def score_scale(width: int, scaling: Mapping[str, Any]) -> float:
    """The factor of the scores of queries of this ``width``, which YaRN's mscale_all_dim changes."""
    scale = width**-0.5
    if "mscale_all_dim" not in scaling or "factor" not in scaling:
        return scale
    factor = mscale(scaling["factor"], scaling["mscale_all_dim"])
    return scale * factor * factor


def read_attention(tree: Json) -> dict[str, Any]:
    """Settings of attention that depend on several keys; ConfigError for keys that contradict others."""
    heads = tree["num_attention_heads"]
    if tree["num_key_value_heads"] != heads:
        raise ConfigError(
            f"num_key_value_heads={tree['num_key_value_heads']}, but latent attention needs num_attention_heads={heads}"
        )
    given = tree["rope_parameters"]
    kind = given.get("rope_type")
    if given.get("mscale_all_dim") and kind not in ("yarn", "default"):
        raise ConfigError(
            f"rope_parameters: mscale_all_dim with rope_type={kind}, but hpclm supports it only with yarn"
        )
    settings = shape.rope(tree)
    try:
        scaling = parsed(settings["rope.scaling"])
    except ValueError:  # ModelConfig names the wrong parameter
        return settings
    if "mscale_all_dim" in scaling:
        settings["attention.score_scale"] = score_scale(tree["qk_nope_head_dim"] + tree["qk_rope_head_dim"], scaling)
    return settings


def write_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_attention() reads, and those that other programs need."""
    return shape.described_rope(config) | dict(num_key_value_heads=config.attention.heads, moe_layer_freq=1)


ATTENTION = Part(read_attention, write_attention)
SIGMOID = dict(scoring_func="sigmoid", topk_method="noaux_tc")
"""Keys that transformers does not read, but other programs do."""
INTERLEAVED = dict(rope_interleave=True, num_nextn_predict_layers=0)


def rotating(family: Family, tree: Json) -> Family:
    """``family`` with the weights that a config.json describes: some rotate halves."""
    if tree["rope_interleave"]:
        return family
    return replace(family, rules=partial(rules, interleave=False))


def read_v3(tree: Json) -> dict[str, Any]:
    """No experts if all layers are dense."""
    return {"experts.count": 0} if tree["first_k_dense_replace"] >= tree["num_hidden_layers"] else {}


def write_v3(config: ModelConfig) -> dict[str, Any]:
    """The keys of the experts, if any, and of the rotation."""
    if not config.experts.count:
        return INTERLEAVED | dict(first_k_dense_replace=config.layers)
    return INTERLEAVED | SIGMOID


V3 = replace(
    mixtures.GLM4_MOE,
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    keys=KEYS | mixtures.SIGMOID_KEYS,
    rules=rules,
    constants={**CONSTANTS, **mixtures.BALANCED, "experts.router_score": "sigmoid"},
    parts=(ATTENTION, shape.ATTENTION_BIASES, mixtures.SHARED, mixtures.FIRST_DENSE),
    read=read_v3,
    write=write_v3,
    form=rotating,
    fixed={**mixtures.GLM4_MOE.fixed, "moe_layer_freq": (1,)},
    unread="ep_size aux_loss_alpha seq_aux",
)


def read_v2(tree: Json) -> dict[str, Any]:
    """No setting. ConfigError for groups of experts chosen by the best of each, which hpclm lacks."""
    groups = tree["n_group"]
    top = tree["topk_group"]
    if tree["topk_method"] not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"topk_method={tree['topk_method']}, but hpclm supports greedy or group_limited_greedy")
    if tree["topk_method"] == "group_limited_greedy" and (groups is None or groups != top):
        raise ConfigError(
            f"topk_method=group_limited_greedy with n_group={groups}: it chooses topk_group={top} groups by the best "
            "score of each, but hpclm by the sum of the two best"
        )
    return {}


V2 = replace(
    V3,
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    keys=KEYS
    | {
        "experts.count": "n_routed_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.ffn": "moe_intermediate_size",
        "experts.router_scale": "routed_scaling_factor",
    },
    constants={**CONSTANTS, "experts.router_normalize": False},
    read=read_v2,
    write=lambda config: dict(
        scoring_func="softmax", topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False
    ),
    form=lambda family, tree: family,
    newer=lambda config: config.rope.scaling.get("rope_type") == "yarn",
    fixed=dict(scoring_func=("softmax",), moe_layer_freq=(1,)),
    left_out=lambda tree, name: False,
)


def read_glm_lite(tree: Json) -> dict[str, Any]:
    """The layers with experts."""
    types = tree["mlp_layer_types"]
    if len(types) != tree["num_hidden_layers"] or not {*types} <= {"dense", "sparse"}:
        raise ConfigError(f"mlp_layer_types={types} must be a list of dense and sparse, one for each layer")
    pattern = mixtures.pattern(kind == "sparse" for kind in types)
    dense = tree.get("first_k_dense_replace")
    if dense is not None and mixtures.read_first_dense(tree) != pattern:
        raise ConfigError(f"first_k_dense_replace={dense}, but this class reads mlp_layer_types={types}")
    return pattern


def write_glm_lite(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_glm_lite() reads, and those of the rotation and the router."""
    types = ["sparse" if sparse else "dense" for sparse in mixtures.sparse_layers(config)]
    return dict(mlp_layer_types=types) | INTERLEAVED | SIGMOID


GLM_LITE = replace(
    V3,
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    parts=(ATTENTION, shape.ATTENTION_BIASES, mixtures.SHARED),
    read=read_glm_lite,
    write=write_glm_lite,
)
ALL_FAMILIES: Iterable[Family] = (V3, V2, GLM_LITE)
