"""transformers' Ernie4_5_MoeForCausalLM, Dots1ForCausalLM and Glm4MoeForCausalLM: a bias on the choice of experts, and shared experts."""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import expert_weights, llama, shape
from hpclm.interop.huggingface.completion import Keys
from hpclm.interop.huggingface.glm_phi import TURNED, interleaved
from hpclm.interop.huggingface.shape import Json
from hpclm.interop.rules import ConversionRule, changed, reordered

GLM_BIASES = ("attention_bias", False, False)
ERNIE_NAMES = expert_weights.Names(choice_bias="mlp.moe_statics.e_score_correction_bias")
NUMBERED = re.compile(r"(?:model\.)?layers\.(\d+)\.")
BALANCED = {"experts.router_choice_bias": True}


def shared(tree: Keys, key: str, width: str, fewest: int = 0) -> dict[str, Any]:
    """The total inner size of the shared experts: ``key`` is their number, ``width`` the size of each."""
    count = tree[key]
    if type(count) is not int or count < fewest:
        raise ConfigError(f"{key}={count} must be a whole number of at least {fewest}")
    return {"experts.shared_ffn": count * tree[width]}


def ernie_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of an ERNIE 4.5, which rotates pairs of neighbours and has a bias [1, E]."""

    def flat(rule: ConversionRule) -> ConversionRule:
        return replace(rule, split=lambda x: [x[None]], join=lambda tensors: tensors[0].flatten())

    rules = expert_weights.rules(config, ERNIE_NAMES)
    rules = changed(rules, ".attention.qkv.", partial(reordered, order=interleaved(config)))
    return changed(rules, ".choice_bias", flat)


def _sparse(first: int, last: int, interval: int, count: int) -> list[bool]:
    return [first <= i <= last and (i + 1) % interval == 0 for i in range(count)]


def read_ernie(tree: Keys) -> dict[str, Any]:
    """Settings that depend on several keys: every moe_layer_interval-th of some consecutive layers has experts."""
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    first, last, interval = (tree[name] for name in names)
    if not type(first) is type(last) is type(interval) is int or interval < 1:
        raise ConfigError(
            f"{', '.join(f'{name}={tree[name]}' for name in names)} must be whole numbers, the interval at least 1"
        )
    sparse = _sparse(first, last, interval, tree["num_hidden_layers"])
    settings = llama.read_llama(tree, llama.NONE) | shared(tree, "moe_num_shared_experts", "moe_intermediate_size")
    return settings | expert_weights.mlp_pattern(sparse)


def write_ernie(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_ernie() reads."""
    keys: dict[str, Any] = dict(moe_num_shared_experts=config.experts.shared_ffn // config.expert_width, use_bias=False)
    sparse = [layer.experts is not None for layer in config.blocks]
    if any(sparse):
        first = sparse.index(True)
        last = config.layers - 1 - sparse[::-1].index(True)
        intervals = range(1, config.layers + 1)
        nearest = (n for n in intervals if _sparse(first, last, n, config.layers) == sparse)
        keys |= dict(moe_layer_start_index=first, moe_layer_end_index=last, moe_layer_interval=next(nearest, 1))
    return llama.write_llama(config, llama.NONE) | keys


def ernie_left_out(tree: Json, name: str) -> bool:
    """Whether a tensor belongs to layers for multi-token prediction."""
    return "mtp_" in name


ERNIE4_5_MOE = replace(
    llama.LLAMA,
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    keys={
        **{ours: key for ours, key in llama.LLAMA.keys.items() if ours != "attention.dropout"},
        "experts.count": "moe_num_experts",
        "experts.per_token": "moe_k",
        "experts.ffn": "moe_intermediate_size",
    },
    rules=ernie_rules,
    constants={**llama.LLAMA.constants, **BALANCED, "experts.router_normalize": True},
    fixed=dict(moe_gate_act=("softmax", None)),
    write=write_ernie,
    read=read_ernie,
    unread="moe_capacity moe_gate moe_use_aux_free",
    left_out=ernie_left_out,
)
SIGMOID_KEYS = {
    "experts.count": "n_routed_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.ffn": "moe_intermediate_size",
    "experts.router_normalize": "norm_topk_prob",
    "experts.router_scale": "routed_scaling_factor",
    "experts.router_groups": "n_group",
    "experts.router_top_groups": "topk_group",
}


def read_first_dense(tree: Keys) -> dict[str, Any]:
    """The layers with experts, which are those after the first ones, and the shared experts."""
    dense = tree["first_k_dense_replace"]
    if type(dense) is not int or dense < 0:
        raise ConfigError(f"first_k_dense_replace={dense} must be a whole number of at least 0")
    settings = shared(tree, "n_shared_experts", "moe_intermediate_size", fewest=1)
    return settings | expert_weights.mlp_pattern([i >= dense for i in range(tree["num_hidden_layers"])])


def read_groups(tree: Keys) -> dict[str, Any]:
    """Settings of a router with groups."""
    settings: dict[str, Any] = {"experts.router_normalize": bool(tree["norm_topk_prob"])}
    for ours in ("experts.router_groups", "experts.router_top_groups"):
        key = SIGMOID_KEYS[ours]
        groups = tree[key]
        if groups is None:
            groups = 1
        # without groups, transformers chooses experts regardless of their scores
        if type(groups) is not int or groups < 1:
            raise ConfigError(f"{key}={groups} must be a whole number of at least 1")
        settings[ours] = groups
    return settings


def read_sigmoid(tree: Keys) -> dict[str, Any]:
    """Settings common to dots1 and GLM 4.5: the first layers are dense, the others have experts chosen by sigmoids in groups."""
    return read_first_dense(tree) | read_groups(tree)


def write_sigmoid(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_sigmoid() reads."""
    count = max(1, config.experts.shared_ffn // config.expert_width)
    sparse = [layer.experts is not None for layer in config.blocks]
    return dict(first_k_dense_replace=[*sparse, True].index(True), n_shared_experts=count)


def write_dots1(config: ModelConfig) -> dict[str, Any]:
    """The keys of a dots1."""
    layers = {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window}
    biases = llama.write_llama(config, llama.ALL_ATTENTION)
    return biases | layers | {"max_window_layers": config.layers} | write_sigmoid(config)


DOTS1 = replace(
    llama.LLAMA,
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    keys={**llama.LLAMA.keys, **SIGMOID_KEYS},
    rules=expert_weights.rules,
    constants={**llama.LLAMA.constants, **BALANCED, "experts.router_score": "sigmoid", "attention.qk_norm": True},
    fixed=dict(scoring_func=("sigmoid",), topk_method=("noaux_tc",)),
    write=write_dots1,
    read=lambda tree: llama.read_windowed(tree, llama.ALL_ATTENTION) | read_sigmoid(tree),
)


def read_glm4_moe(tree: Keys) -> dict[str, Any]:
    """Settings that depend on several keys."""
    return llama.read_llama(tree, GLM_BIASES) | read_sigmoid(tree)


def write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_glm4_moe() reads."""
    settings = dict(partial_rotary_factor=config.rope.fraction, num_nextn_predict_layers=0)
    return llama.write_llama(config, GLM_BIASES) | settings | write_sigmoid(config)


def glm_left_out(tree: Json, name: str) -> bool:
    """Whether a tensor belongs to the layers for multi-token prediction after the others."""
    layer = NUMBERED.match(name)
    layers = tree["num_hidden_layers"]
    return layer is not None and layers <= int(layer[1]) < layers + tree["num_nextn_predict_layers"]


GLM4_MOE = replace(
    DOTS1,
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    keys={**DOTS1.keys, "attention.qk_norm": "use_qk_norm"},
    constants=TURNED | {**BALANCED, "experts.router_score": "sigmoid"},
    write=write_glm4_moe,
    read=read_glm4_moe,
    left_out=glm_left_out,
)
ALL_FAMILIES = (ERNIE4_5_MOE, DOTS1, GLM4_MOE)
