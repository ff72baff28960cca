"""transformers' DeepseekV2ForCausalLM, DeepseekV3ForCausalLM and Glm4MoeLiteForCausalLM: multi-head latent attention."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.rope import parsed
from hpclm.interop.huggingface import biased_mixtures, expert_weights, llama, shape
from hpclm.interop.huggingface.family import Family, Json
from hpclm.interop.huggingface.glm_phi import pairs
from hpclm.interop.rules import ConversionRule, changed, rows_reordered
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
NEEDS = {**llama.LLAMA.needs, "attention.latent.norm_eps": (1e-6,)}
READ = f"{shape.ROPE} attention_bias num_key_value_heads head_dim first_k_dense_replace n_shared_experts"
UNREAD = "auto_map pretraining_tp ep_size aux_loss_alpha seq_aux qk_head_dim output_router_logits"


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


def attention(tree: Json) -> dict[str, Any]:
    """Settings of attention that depend on several keys."""
    settings = llama.read_settings(tree, llama.ALL_ATTENTION)
    try:
        scaling = parsed(settings["rope.scaling"])
    except ValueError:  # ModelConfig names the wrong parameter
        return settings
    if "mscale_all_dim" in scaling:
        settings["attention.score_scale"] = score_scale(tree["qk_nope_head_dim"] + tree["qk_rope_head_dim"], scaling)
    return settings


def described_attention(config: ModelConfig) -> dict[str, Any]:
    """The keys that attention() reads, and those that other programs need."""
    count = dict(num_key_value_heads=config.attention.heads, moe_layer_freq=1)
    return llama.described_llama(config, llama.ALL_ATTENTION) | count


def wrong(tree: Json) -> Iterator[str]:
    """Keys that contradict others, and a scaling that changes scores without YaRN."""
    heads = tree["num_attention_heads"]
    if tree["num_key_value_heads"] not in (None, heads):
        yield f"num_key_value_heads={tree['num_key_value_heads']}, but latent attention needs num_attention_heads={heads}"
    if tree.get("head_dim") not in (None, tree["qk_rope_head_dim"]):
        yield f"head_dim={tree['head_dim']}, but this class needs qk_rope_head_dim={tree['qk_rope_head_dim']}"
    for key in ("rope_parameters", "rope_scaling"):
        given = shape.mapping(tree.get(key), key)
        kind = given.get("rope_type", given.get("type", "default"))
        if given.get("mscale_all_dim") and kind not in ("yarn", "default"):
            yield f"{key}.mscale_all_dim with rope_type={kind}, but hpclm supports it only with yarn"


def more(config: ModelConfig) -> Iterator[str]:
    """Reasons why these classes do not cover the attention of a network."""
    yield from shape.bias_obstacles(config, llama.ALL_ATTENTION)
    if not config.attention.latent.kv_rank:
        yield "model.attention.latent.kv_rank=0, but it needs latent attention"
    needed = score_scale(config.head_width, shape.scaling(config))
    given = config.attention.score_scale
    if not math.isclose(given or config.head_width**-0.5, needed, rel_tol=1e-6):
        yield f"model.attention.score_scale={shape.as_json(given)}, but it needs {needed} with this model.rope.scaling"


V3_ONLY = {"experts.router_choice_bias": (True,), "experts.router_score": ("sigmoid",)}
SIGMOID = dict(scoring_func="sigmoid", topk_method="noaux_tc")
"""Keys that transformers does not read, but other programs do."""


def rotating(family: Family, tree: Json) -> Family:
    """``family`` with the weights that a config.json describes: some rotate halves."""
    if family.completed(tree)["rope_interleave"]:
        return family
    return replace(family, rules=partial(rules, interleave=False))


def v3_form(family: Family, tree: Json) -> Family:
    """DeepSeek V3 as a config.json describes it: without experts, if all layers are dense."""
    tree = V3.completed(tree)
    dense = tree["first_k_dense_replace"]
    layers = tree["num_hidden_layers"]
    if type(dense) is type(layers) is int and dense >= layers > 0:
        return rotating(DENSE, tree)
    return rotating(V3, tree)


V3 = replace(
    biased_mixtures.GLM4_MOE,
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    keys={**KEYS, **biased_mixtures.SIGMOID_KEYS},
    rules=rules,
    needs={**NEEDS, **biased_mixtures.BALANCED, **V3_ONLY},
    fixed={**biased_mixtures.GLM4_MOE.fixed, "moe_layer_freq": (1,)},
    constant=lambda config: (
        described_attention(config)
        | biased_mixtures.described_sigmoid(config)
        | SIGMOID
        | dict(rope_interleave=True, num_nextn_predict_layers=0)
    ),
    form=v3_form,
    shape=lambda tree: attention(tree) | biased_mixtures.sigmoid(tree),
    covers=(*llama.LLAMA.covers, *biased_mixtures.SPLIT, "attention.score_scale"),
    read=f"{READ} num_nextn_predict_layers rope_interleave",
    unread=UNREAD,
    wrong=wrong,
    more=lambda config: [*more(config), *biased_mixtures.more_sigmoid(config)],
)
DENSE = replace(
    V3,
    keys=KEYS,
    needs={**NEEDS, "experts.count": (0,)},
    constant=lambda config: (
        described_attention(config)
        | dict(rope_interleave=True, num_nextn_predict_layers=0, first_k_dense_replace=config.layers)
    ),
    shape=attention,
    covers=(*llama.LLAMA.covers, "attention.score_scale"),
    unread=" ".join([UNREAD, *biased_mixtures.SIGMOID_KEYS.values()]),
    more=more,
)
"""Without experts."""
KIMI = replace(V3, model_type="kimi_k2")
"""Another name for the same network."""


def wrong_v2(tree: Json) -> Iterator[str]:
    """Groups of experts by the best of each, which hpclm lacks."""
    yield from wrong(tree)
    groups = tree["n_group"]
    all_groups = type(groups) is int and groups == tree["topk_group"]
    if tree["topk_method"] == "group_limited_greedy" and not all_groups:
        yield (
            f"topk_method=group_limited_greedy with n_group={groups}: it chooses topk_group={tree['topk_group']} groups by the best "
            "score of each, but hpclm by the sum of the two best"
        )


V2 = replace(
    V3,
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    keys={
        **KEYS,
        "experts.count": "n_routed_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.ffn": "moe_intermediate_size",
        "experts.router_scale": "routed_scaling_factor",
    },
    needs={**NEEDS, "experts.router_normalize": (False,)},
    fixed=dict(
        scoring_func=("softmax",),
        topk_method=("greedy", "group_limited_greedy"),
        moe_layer_freq=(1,),
        norm_topk_prob=(False, None),
        mlp_bias=(False,),
    ),
    aliases={"num_experts": "n_routed_experts"},
    constant=lambda config: (
        described_attention(config)
        | biased_mixtures.described_sigmoid(config)
        | dict(scoring_func="softmax", topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False)
    ),
    form=lambda family, tree: family,
    shape=lambda tree: attention(tree) | biased_mixtures.first_dense(tree),
    read=f"{READ} n_group topk_group",
    left_out=lambda tree, name: False,
    wrong=wrong_v2,
)


def glm_lite(tree: Json) -> dict[str, Any]:
    """Settings that depend on several keys; the first layer is dense unless mlp_layer_types says otherwise."""
    count = max(1, shape.whole(tree, "num_hidden_layers"))
    types = tree["mlp_layer_types"]
    if types is None:
        types = ["dense" if i == 0 else "sparse" for i in range(count)]
    if not isinstance(types, list) or len(types) != count or any(kind not in ("dense", "sparse") for kind in types):
        raise ConfigError(f"mlp_layer_types={types}: hpclm has dense and sparse, one for each of {count} layers")
    settings = biased_mixtures.shared(tree, "n_shared_experts", "moe_intermediate_size", fewest=1)
    settings |= expert_weights.mlp_pattern([kind == "sparse" for kind in types])
    dense = tree.get("first_k_dense_replace")
    if dense is not None and biased_mixtures.first_dense(tree) != settings:
        raise ConfigError(f"first_k_dense_replace={dense}, but this class reads mlp_layer_types={types}")
    return attention(tree) | settings | biased_mixtures.grouped(tree)


def described_glm_lite(config: ModelConfig) -> dict[str, Any]:
    """The keys that glm_lite() reads."""
    types = ["dense" if layer.experts is None else "sparse" for layer in config.blocks]
    settings = dict(mlp_layer_types=types, rope_interleave=True, num_nextn_predict_layers=0)
    shared = dict(n_shared_experts=config.experts.shared_ffn // config.expert_width)
    return described_attention(config) | shared | SIGMOID | settings


GLM_LITE = replace(
    V3,
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    constant=described_glm_lite,
    form=rotating,
    shape=glm_lite,
    read=f"{V3.read} mlp_layer_types",
    more=lambda config: [*more(config), *biased_mixtures.more(config)],
)
ALL_FAMILIES: Iterable[Family] = (DENSE, V3, V2, GLM_LITE)
