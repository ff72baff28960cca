"""transformers' Ernie4_5_MoeForCausalLM, Dots1ForCausalLM and Glm4MoeForCausalLM: a bias on the choice of experts, and shared experts."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import expert_weights, llama, shape
from hpclm.interop.huggingface.family import Json
from hpclm.interop.huggingface.glm_phi import TURNED, interleaved
from hpclm.interop.rules import ConversionRule, changed, reordered

GLM_BIASES = ("attention_bias", False, False)
ERNIE_NAMES = expert_weights.Names(choice_bias="mlp.moe_statics.e_score_correction_bias")
NUMBERED = re.compile(r"(?:model\.)?layers\.(\d+)\.")
BALANCED = {"experts.router_choice_bias": (True,), "experts.router_bias": (False,)}
SPLIT = ("experts.shared_ffn", "experts.pattern")


def shared(tree: Json, key: str, width: str, fewest: int = 0) -> dict[str, Any]:
    """The total inner size of the shared experts: ``key`` is their number, ``width`` the size of each."""
    count = tree[key]
    if type(count) is not int or count < fewest:
        raise ConfigError(f"{key}={count} must be a whole number of at least {fewest}")
    return {"experts.shared_ffn": count * shape.whole(tree, width)}


def more(config: ModelConfig, fewest: int = 1) -> Iterator[str]:
    """Reasons why these classes, with at least ``fewest`` shared experts, do not cover a network."""
    yield from expert_weights.absent(config)
    if not config.experts.count:
        return
    if config.experts.shared_ffn % config.expert_width:
        yield f"model.experts.shared_ffn={config.experts.shared_ffn}, but it needs a multiple of the experts' width of {config.expert_width}"
    elif config.experts.shared_ffn < fewest:
        yield f"model.experts.shared_ffn={config.experts.shared_ffn}, but it needs shared experts"


def ernie_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of an ERNIE 4.5, which rotates pairs of neighbours and has a bias [1, E]."""

    def flat(rule: ConversionRule) -> ConversionRule:
        return replace(rule, split=lambda x: [x[None]], join=lambda tensors: tensors[0].flatten())

    rules = expert_weights.rules(config, ERNIE_NAMES)
    rules = changed(rules, ".attention.qkv.", partial(reordered, order=interleaved(config)))
    return changed(rules, ".choice_bias", flat)


def _sparse(first: int, last: int, interval: int, count: int) -> list[bool]:
    return [first <= i <= last and (i + 1) % interval == 0 for i in range(count)]


def ernie(tree: Json) -> dict[str, Any]:
    """Settings that depend on several keys: every moe_layer_interval-th of some consecutive layers has experts."""
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    first, last, interval = (tree[name] for name in names)
    if not type(first) is type(last) is type(interval) is int or interval < 1:
        raise ConfigError(
            f"{', '.join(f'{name}={tree[name]}' for name in names)} must be whole numbers, the interval at least 1"
        )
    count = max(1, shape.whole(tree, "num_hidden_layers"))
    if last == -1:
        last = count - 1
    sparse = _sparse(first, last, interval, count)
    settings = llama.read_settings(tree, llama.NONE, 500000.0) | shared(
        tree, "moe_num_shared_experts", "moe_intermediate_size"
    )
    return settings | expert_weights.mlp_pattern(sparse)


def described_ernie_layers(config: ModelConfig) -> dict[str, int] | None:
    """The keys for layers with experts; None if config.json cannot describe the layers."""
    sparse = [layer.experts is not None for layer in config.blocks]
    if not any(sparse):
        return None
    first = sparse.index(True)
    last = config.layers - 1 - sparse[::-1].index(True)
    intervals = range(1, config.layers + 1)
    interval = next((n for n in intervals if _sparse(first, last, n, config.layers) == sparse), None)
    if interval is None:
        return None
    return dict(moe_layer_start_index=first, moe_layer_end_index=last, moe_layer_interval=interval)


def described_ernie(config: ModelConfig) -> dict[str, Any]:
    """The keys that ernie() reads."""
    count = dict(moe_num_shared_experts=config.experts.shared_ffn // config.expert_width, use_bias=False)
    return llama.described_llama(config, llama.NONE) | count | (described_ernie_layers(config) or {})


def more_ernie(config: ModelConfig) -> Iterator[str]:
    """Reasons why an ERNIE 4.5 does not cover a network."""
    yield from shape.bias_obstacles(config, llama.NONE)
    yield from more(config, fewest=0)
    if config.experts.count and described_ernie_layers(config) is None:
        yield f"model.experts.pattern={config.experts.pattern}, but it needs experts in every n-th of consecutive layers"


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
    needs={**llama.LLAMA.needs, **BALANCED, "experts.router_normalize": (True,)},
    fixed=dict(use_bias=(False, None), moe_norm_min=(1e-12,), moe_gate_act=("softmax", None)),
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    constant=described_ernie,
    shape=ernie,
    covers=(*llama.LLAMA.covers, *SPLIT),
    read=f"{shape.ROPE} moe_num_shared_experts moe_layer_start_index moe_layer_end_index moe_layer_interval",
    unread=f"moe_capacity moe_gate moe_use_aux_free num_nextn_predict_layers {expert_weights.LOSSES}",
    left_out=ernie_left_out,
    wrong=lambda tree: (),
    remark=expert_weights.remark,
    more=more_ernie,
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


def first_dense(tree: Json) -> dict[str, Any]:
    """The layers with experts, which are those after the first ones, and the shared experts."""
    dense = tree["first_k_dense_replace"]
    if type(dense) is not int or dense < 0:
        raise ConfigError(f"first_k_dense_replace={dense} must be a whole number of at least 0")
    count = max(1, shape.whole(tree, "num_hidden_layers"))
    settings = shared(tree, "n_shared_experts", "moe_intermediate_size", fewest=1)
    return settings | expert_weights.mlp_pattern([i >= dense for i in range(count)])


def sigmoid(tree: Json) -> dict[str, Any]:
    """Settings common to dots1 and GLM 4.5: the first layers are dense, the others have experts chosen by sigmoids in groups."""
    return first_dense(tree) | grouped(tree)


def grouped(tree: Json) -> dict[str, Any]:
    """Settings of a router with groups."""
    settings: dict[str, Any] = {}
    for ours in ("experts.router_groups", "experts.router_top_groups"):
        key = SIGMOID_KEYS[ours]
        groups = tree[key]
        if groups is None:
            groups = 1
        # without groups, transformers chooses experts regardless of their scores
        if type(groups) is not int or groups < 1:
            raise ConfigError(f"{key}={groups} must be a whole number of at least 1")
        settings[ours] = groups
    return settings | {"experts.router_normalize": bool(tree["norm_topk_prob"])}


def described_sigmoid(config: ModelConfig) -> dict[str, Any]:
    """The keys that sigmoid() reads."""
    count = config.experts.shared_ffn // config.expert_width
    return dict(first_k_dense_replace=len(expert_weights.dense_layers(config)), n_shared_experts=count)


def more_sigmoid(config: ModelConfig) -> Iterator[str]:
    """Reasons why these classes do not cover a network."""
    yield from more(config)
    dense = expert_weights.dense_layers(config)
    if dense != [*range(len(dense))]:
        yield f"model.experts.pattern={config.experts.pattern}, but it needs experts in all layers after the first ones"


def dots1(tree: Json) -> dict[str, Any]:
    """Settings that depend on several keys; layers from max_window_layers on have a window."""
    return llama.windowed(tree, llama.ALL_ATTENTION, kind=llama.last_layers(tree)) | sigmoid(tree)


def described_dots1(config: ModelConfig) -> dict[str, Any]:
    """The keys that dots1() reads."""
    layers = {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window}
    biases = llama.described_llama(config, ("attention_bias", "attention_bias", False))
    return biases | layers | {"max_window_layers": config.layers} | described_sigmoid(config)


DOTS1 = replace(
    llama.WINDOWED,
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    keys={**llama.LLAMA.keys, **SIGMOID_KEYS},
    rules=expert_weights.rules,
    needs={**llama.LLAMA.needs, **BALANCED, "experts.router_score": ("sigmoid",), "attention.qk_norm": (True,)},
    fixed=dict(scoring_func=("sigmoid",), topk_method=("noaux_tc",)),
    aliases={"num_local_experts": "n_routed_experts"},
    constant=described_dots1,
    shape=dots1,
    covers=(*llama.WINDOWED.covers, *SPLIT),
    read=f"{shape.ROPE} {shape.LAYERS} attention_bias max_window_layers first_k_dense_replace n_shared_experts",
    unread="output_router_logits",
    more=lambda config: [
        *shape.bias_obstacles(config, llama.ALL_ATTENTION),
        *more_sigmoid(config),
        *shape.only(config, "full", "window"),
    ],
)


def glm4_moe(tree: Json) -> dict[str, Any]:
    """Settings that depend on several keys; without partial_rotary_factor, half of each head is rotated."""
    rope = shape.rope(tree, part=0.5) | shape.biases(tree, GLM_BIASES)
    return rope | sigmoid(tree) | {"attention.qk_norm": bool(tree["use_qk_norm"])}


def described_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    """The keys that glm4_moe() reads."""
    settings = dict(
        partial_rotary_factor=config.rope.fraction, use_qk_norm=config.attention.qk_norm, num_nextn_predict_layers=0
    )
    return llama.described_llama(config, GLM_BIASES) | settings | described_sigmoid(config)


def glm_left_out(tree: Json, name: str) -> bool:
    """Whether a tensor belongs to the layers for multi-token prediction after the others."""
    layer = NUMBERED.match(name)
    layers = shape.whole(tree, "num_hidden_layers")
    count = tree.get("num_nextn_predict_layers", 1)
    return layer is not None and type(count) is int and layers <= int(layer[1]) < layers + count


GLM4_MOE = replace(
    DOTS1,
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    needs=TURNED | {**BALANCED, "experts.router_score": ("sigmoid",)},
    aliases={**DOTS1.aliases, "num_mtp_layers": "num_nextn_predict_layers"},
    constant=described_glm4_moe,
    shape=glm4_moe,
    covers=(*llama.LLAMA.covers, *SPLIT, "attention.qk_norm"),
    read=(f"{shape.ROPE} attention_bias use_qk_norm first_k_dense_replace n_shared_experts num_nextn_predict_layers"),
    left_out=glm_left_out,
    more=lambda config: [*shape.bias_obstacles(config, GLM_BIASES), *more_sigmoid(config)],
)
ALL_FAMILIES = (ERNIE4_5_MOE, DOTS1, GLM4_MOE)
