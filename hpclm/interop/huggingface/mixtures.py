"""transformers' mixtures of experts: Mixtral, Qwen 3, OLMoE, gpt-oss, and with a bias on the choice of experts ERNIE 4.5, dots1, GLM 4.5."""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import expert_weights, llama, relatives, shape
from hpclm.interop.huggingface.relatives import TURNED
from hpclm.interop.huggingface.shape import Json, Part
from hpclm.interop.rules import LOGICAL, ConversionRule, changed, neighbours, reordered, same, transformed, transposed

MIXTRAL_NAMES = expert_weights.Names(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{}.", up=("w1", "w3"), down=("w2",)
)
ERNIE_NAMES = expert_weights.Names(choice_bias="mlp.moe_statics.e_score_correction_bias")
GPT_OSS_NAMES = {
    "up": "gate_up_proj",
    "up_bias": "gate_up_proj_bias",
    "down": "down_proj",
    "down_bias": "down_proj_bias",
}
NUMBERED = re.compile(r"(?:model\.)?layers\.(\d+)\.")
KEYS = {
    "experts.count": "num_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.ffn": "moe_intermediate_size",
    "experts.router_normalize": "norm_topk_prob",
}
WITHOUT_FFN = {ours: key for ours, key in llama.LLAMA.keys.items() if ours != "ffn"}
SIGMOID_KEYS = KEYS | {
    "experts.count": "n_routed_experts",
    "experts.router_scale": "routed_scaling_factor",
    "experts.router_groups": "n_group",
    "experts.router_top_groups": "topk_group",
}
BALANCED = {"experts.router_choice_bias": True}


def pattern(sparse: Iterable[bool]) -> dict[str, Any]:
    """Our setting for the layers with experts."""
    return {"experts.pattern": shape.period(["experts" if experts else "dense" for experts in sparse])}


def sparse_layers(config: ModelConfig) -> list[bool]:
    """Whether each layer has experts."""
    return [layer.experts is not None for layer in config.blocks]


def shared(key: str, fewest: int) -> Part:
    """The total inner size of the shared experts, of which ``key`` is the number, at least ``fewest``."""

    def read(tree: Json) -> dict[str, Any]:
        count = tree[key]
        if type(count) is not int or count < fewest:
            raise ConfigError(f"{key}={count} must be a whole number of at least {fewest}")
        return {"experts.shared_ffn": count * tree["moe_intermediate_size"]}

    def write(config: ModelConfig) -> dict[str, Any]:
        if not config.experts.count:
            return {}
        return {key: max(fewest, config.experts.shared_ffn // config.expert_width)}

    return Part(read, write)


def read_first_dense(tree: Json) -> dict[str, Any]:
    """The layers with experts, which are those after the first ones."""
    dense = tree["first_k_dense_replace"]
    if type(dense) is not int or dense < 0:
        raise ConfigError(f"first_k_dense_replace={dense} must be a whole number of at least 0")
    return pattern(i >= dense for i in range(tree["num_hidden_layers"]))


SHARED = shared("n_shared_experts", fewest=1)
FIRST_DENSE = Part(
    read_first_dense, lambda config: dict(first_k_dense_replace=[*sparse_layers(config), True].index(True))
)
MIXTRAL = replace(
    llama.MISTRAL,
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    keys=WITHOUT_FFN
    | {
        "experts.count": "num_local_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.ffn": "intermediate_size",
    },
    rules=partial(expert_weights.rules, names=MIXTRAL_NAMES),
    constants={**llama.MISTRAL.constants, "experts.router_normalize": True},
)


def read_qwen3_moe(tree: Json) -> dict[str, Any]:
    """The layers with experts: every decoder_sparse_step-th of a Qwen 3, except mlp_only_layers."""
    step = tree["decoder_sparse_step"]
    dense = tree["mlp_only_layers"]
    if step < 1:
        raise ConfigError(f"decoder_sparse_step={step} must be a whole number of at least 1")
    return pattern(i not in dense and (i + 1) % step == 0 for i in range(tree["num_hidden_layers"]))


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_qwen3_moe() reads."""
    dense = [number for number, sparse in enumerate(sparse_layers(config)) if not sparse]
    switch = dict(use_sliding_window=bool(config.attention.window))
    return dict(decoder_sparse_step=1, mlp_only_layers=dense) | switch


QWEN3_MOE = replace(
    llama.QWEN3,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    keys={**llama.LLAMA.keys, **KEYS},
    rules=expert_weights.rules,
    parts=(shape.ROPE, shape.ATTENTION_BIASES, shape.UNIFORM_WINDOWS),
    read=read_qwen3_moe,
    write=write_qwen3_moe,
    fixed=dict(qkv_bias=(False,), use_qk_norm=(True,), shared_expert_intermediate_size=(0,)),
)
OLMOE = replace(
    relatives.OLMO2,
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    keys={ours: key for ours, key in WITHOUT_FFN.items() if ours in llama.NARROW}
    | KEYS
    | {"experts.ffn": "intermediate_size"},
    rules=expert_weights.rules,
    constants={**relatives.OLMO2.constants, "norm_order": "pre"},
)


def gpt_oss_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of a gpt-oss: rows of gate and up projection alternate, and matrices are [in, out]."""
    for rule in llama.rules(config, {"attention": "self_attn"}):
        match = LOGICAL.fullmatch(rule.ours)
        assert match is not None
        block, module, kind = match.groups()
        if module != "mlp.experts":
            yield rule
            continue
        rule = same(rule.ours, f"{llama.LAYER.format(block)}mlp.experts.{GPT_OSS_NAMES[kind]}")
        if kind.startswith("up"):
            rule = expert_weights.interleaved(rule)
        if not kind.endswith("bias"):
            rule = transposed(rule)
        yield rule


def read_gpt_oss(tree: Json) -> dict[str, Any]:
    """No setting. The published models give the number of chosen experts twice."""
    one = tree["num_experts_per_tok"]
    other = tree.get("experts_per_token", one)
    if other != one:
        raise ConfigError(f"experts_per_token={other} and num_experts_per_tok={one}: two names of one setting")
    return {}


GPT_OSS = replace(
    MIXTRAL,
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    rules=gpt_oss_rules,
    constants={**MIXTRAL.constants, "attention.sinks": True, "experts.router_bias": True},
    parts=(shape.STATED_ROPE, shape.biases("attention_bias", "attention_bias", True), shape.STATED_WINDOWS),
    read=read_gpt_oss,
    activations={"silu": "swiglu_clamped"},
    fixed=dict(swiglu_alpha=(1.702,), swiglu_limit=(7.0,)),
    unread="initial_context_length",
)


def ernie_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of an ERNIE 4.5, which rotates pairs of neighbours and has a bias [1, E]."""
    rules = expert_weights.rules(config, ERNIE_NAMES)
    rules = changed(rules, ".attention.qkv.", partial(reordered, order=neighbours(config)))
    return changed(rules, ".choice_bias", partial(transformed, there=lambda x: x[None], here=Tensor.flatten))


def _sparse(first: int, last: int, interval: int, count: int) -> list[bool]:
    return [first <= i <= last and (i + 1) % interval == 0 for i in range(count)]


def read_ernie(tree: Json) -> dict[str, Any]:
    """The layers with experts: every moe_layer_interval-th of some consecutive layers."""
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    first, last, interval = (tree[name] for name in names)
    if not type(first) is type(last) is type(interval) is int or interval < 1:
        raise ConfigError(
            f"{', '.join(f'{name}={tree[name]}' for name in names)} must be whole numbers, the interval at least 1"
        )
    return pattern(_sparse(first, last, interval, tree["num_hidden_layers"]))


def write_ernie(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_ernie() reads."""
    sparse = sparse_layers(config)
    if not any(sparse):
        return {}
    first = sparse.index(True)
    last = config.layers - 1 - sparse[::-1].index(True)
    intervals = range(1, config.layers + 1)
    nearest = (n for n in intervals if _sparse(first, last, n, config.layers) == sparse)
    return dict(moe_layer_start_index=first, moe_layer_end_index=last, moe_layer_interval=next(nearest, 1))


def ernie_left_out(tree: Json, name: str) -> bool:
    """Whether a tensor belongs to layers for multi-token prediction."""
    return "mtp_" in name


ERNIE4_5_MOE = replace(
    llama.LLAMA,
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    keys={ours: key for ours, key in llama.LLAMA.keys.items() if ours != "attention.dropout"}
    | {"experts.count": "moe_num_experts", "experts.per_token": "moe_k", "experts.ffn": "moe_intermediate_size"},
    rules=ernie_rules,
    constants={**llama.LLAMA.constants, **BALANCED, "experts.router_normalize": True},
    parts=(shape.ROPE, shape.NO_BIASES, shared("moe_num_shared_experts", fewest=0)),
    read=read_ernie,
    write=lambda config: write_ernie(config) | dict(use_bias=False),
    fixed=dict(moe_gate_act=("softmax", None)),
    unread="moe_capacity moe_gate moe_use_aux_free",
    left_out=ernie_left_out,
)
DOTS1 = replace(
    llama.LLAMA,
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    keys={**llama.LLAMA.keys, **SIGMOID_KEYS},
    rules=expert_weights.rules,
    constants={**llama.LLAMA.constants, **BALANCED, "experts.router_score": "sigmoid", "attention.qk_norm": True},
    parts=(shape.ROPE, shape.ATTENTION_BIASES, shape.WINDOWS, SHARED, FIRST_DENSE),
    fixed=dict(scoring_func=("sigmoid",), topk_method=("noaux_tc",)),
)


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
    parts=(shape.ROPE, relatives.GLM_BIASES, SHARED, FIRST_DENSE),
    write=lambda config: dict(partial_rotary_factor=config.rope.fraction, num_nextn_predict_layers=0),
    left_out=glm_left_out,
)
ALL_FAMILIES = (MIXTRAL, QWEN3_MOE, OLMOE, GPT_OSS, ERNIE4_5_MOE, DOTS1, GLM4_MOE)
