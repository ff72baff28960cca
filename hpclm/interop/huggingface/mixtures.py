"""transformers' MixtralForCausalLM, Qwen3MoeForCausalLM, OlmoeForCausalLM and GptOssForCausalLM."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import expert_weights, llama, olmo, shape
from hpclm.interop.huggingface.family import Json
from hpclm.interop.rules import LOGICAL, ConversionRule, same

MIXTRAL_NAMES = expert_weights.Names(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{}.", up=("w1", "w3"), down=("w2",)
)
EVERY_LAYER = {"experts.pattern": (["experts"],)}
MIXTRAL = replace(
    llama.MISTRAL,
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    keys={
        **{ours: key for ours, key in llama.LLAMA.keys.items() if ours != "ffn"},
        "experts.count": "num_local_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.ffn": "intermediate_size",
    },
    rules=partial(expert_weights.rules, names=MIXTRAL_NAMES),
    needs={**llama.MISTRAL.needs, **EVERY_LAYER, "experts.router_normalize": (True,)},
    fixed=dict(router_jitter_noise=(0.0,)),
    aliases={"num_experts": "num_local_experts"},
    shape=lambda tree: llama.read_settings(tree, llama.NONE, 1e6) | shape.layers({**tree, "layer_types": None}),
    unread=expert_weights.LOSSES,
    remark=expert_weights.remark,
    more=lambda config: [*shape.bias_obstacles(config, llama.NONE), *expert_weights.absent(config)],
)


def qwen3_moe(tree: Json) -> dict[str, Any]:
    """Settings that depend on several keys: every decoder_sparse_step-th layer of a Qwen 3 has experts, except mlp_only_layers."""
    step = tree["decoder_sparse_step"]
    dense = tree["mlp_only_layers"] or []
    if type(step) is not int or step < 1:
        raise ConfigError(f"decoder_sparse_step={step} must be a whole number of at least 1")
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ConfigError(f"mlp_only_layers={dense} must be a list of numbers of layers")
    count = max(1, shape.whole(tree, "num_hidden_layers"))
    layers = shape.layers({**tree, "layer_types": None}, switched=True)
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(count)]
    return llama.read_settings(tree, llama.ALL_ATTENTION) | layers | expert_weights.mlp_pattern(sparse)


def described_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    """The keys that qwen3_moe() reads."""
    return llama.described_llama(config, llama.ALL_ATTENTION) | dict(
        decoder_sparse_step=1,
        mlp_only_layers=expert_weights.dense_layers(config),
        sliding_window=config.attention.window,
        use_sliding_window=bool(config.attention.window),
    )


QWEN3_MOE = replace(
    llama.QWEN3,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    keys={**llama.LLAMA.keys, **expert_weights.KEYS},
    rules=expert_weights.rules,
    needs={**llama.QWEN3.needs, "attention.pattern": (["full"], ["window"])},
    fixed=dict(qkv_bias=(False,), use_qk_norm=(True,), shared_expert_intermediate_size=(0,)),
    aliases={"num_local_experts": "num_experts"},
    constant=described_qwen3_moe,
    shape=qwen3_moe,
    covers=(*llama.LLAMA.covers, "attention.window", "experts.pattern"),
    read=f"{llama.LLAMA.read} decoder_sparse_step mlp_only_layers",
    unread=f"{expert_weights.LOSSES} max_window_layers",
    wrong=lambda tree: wrong_layers(tree),
    remark=expert_weights.remark,
    more=lambda config: [*shape.bias_obstacles(config, llama.ALL_ATTENTION), *expert_weights.absent(config)],
)


def wrong_layers(tree: Json) -> Iterator[str]:
    """Errors for kinds of layers in ``tree`` that this class, which has a single kind, does not read."""
    window = tree["sliding_window"] if tree["use_sliding_window"] else None
    yield from llama.other_layers({**tree, "sliding_window": window})


OLMOE = replace(
    olmo.OLMO2,
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    keys={
        **{ours: key for ours, key in llama.NARROW.items() if ours != "ffn"},
        **expert_weights.KEYS,
        "experts.ffn": "intermediate_size",
    },
    rules=expert_weights.rules,
    needs={**olmo.OLMO2.needs, **EVERY_LAYER, "norm_order": ("pre",)},
    fixed=dict(clip_qkv=(None,)),
    aliases={"num_local_experts": "num_experts"},
    unread=expert_weights.LOSSES,
    remark=expert_weights.remark,
    more=lambda config: [*shape.bias_obstacles(config, llama.ALL_ATTENTION), *expert_weights.absent(config)],
)
GPT_OSS_BIASES = ("attention_bias", "attention_bias", True)
GPT_OSS_SCALING = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)
GPT_OSS_NAMES = {
    "up": "gate_up_proj",
    "up_bias": "gate_up_proj_bias",
    "down": "down_proj",
    "down_bias": "down_proj_bias",
}


def gpt_oss_rules(config: ModelConfig) -> Iterable[ConversionRule]:
    """The conversion rule of each weight of a gpt-oss: rows of gate and up projection alternate, and matrices are [in, out]."""
    for rule in llama.rules(config, {"attention": "self_attn"}):
        match = LOGICAL.fullmatch(rule.ours)
        assert match is not None
        block, module, kind = match.groups()
        if module != "mlp.experts":
            yield rule
            continue
        theirs = f"{llama.LAYER.format(block)}mlp.experts.{GPT_OSS_NAMES[kind]}"
        rule = same(rule.ours, theirs)
        if kind.startswith("up"):
            rule = expert_weights.interleaved(rule.ours, theirs)
        if not kind.endswith("bias"):
            rule = turned(rule)
        yield rule


def turned(rule: ConversionRule) -> ConversionRule:
    """The rule for matrices [E, out, in] that are stored as [E, in, out]."""

    def split(x: Tensor) -> list[Tensor]:
        return [part.transpose(1, 2) for part in rule.split(x)]

    return replace(rule, split=split, join=lambda tensors: rule.join([tensors[0].transpose(1, 2)]))


def gpt_oss(tree: Json) -> dict[str, Any]:
    """Settings that depend on several keys. If config.json does not scale positions, transformers applies the published models' scaling."""
    tree = shape.with_default_scaling(tree, GPT_OSS_SCALING)
    return llama.read_settings(tree, GPT_OSS_BIASES, 150000.0) | shape.layers(tree, shape.full_every(2), turned=True)


def described_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    """The keys that gpt_oss() reads."""
    return (
        shape.described_biases(config, GPT_OSS_BIASES)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window or config.context}
        | {"rope_parameters": {"rope_type": "default", **shape.scaling(config), "rope_theta": config.rope.base}}
    )


def wrong_gpt_oss(tree: Json) -> Iterator[str]:
    """The published models give the number of chosen experts twice."""
    one = tree["num_experts_per_tok"]
    other = tree.get("experts_per_token")
    if other not in (None, one):
        yield f"experts_per_token={other} and num_experts_per_tok={one}: two names of one setting"


def more_gpt_oss(config: ModelConfig) -> Iterator[str]:
    """Reasons why gpt-oss does not cover a network."""
    yield from shape.bias_obstacles(config, GPT_OSS_BIASES)
    yield from expert_weights.absent(config)
    yield from shape.only(config, "full", "window")


GPT_OSS = replace(
    MIXTRAL,
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    rules=gpt_oss_rules,
    needs={
        **{ours: values for ours, values in MIXTRAL.needs.items() if ours != "attention.pattern"},
        **{"activation": ("swiglu_clamped",), "attention.sinks": (True,), "experts.router_bias": (True,)},
    },
    fixed=dict(swiglu_alpha=(1.702,), swiglu_limit=(7.0,)),
    activations={"silu": "swiglu_clamped"},
    constant=described_gpt_oss,
    shape=gpt_oss,
    read=f"{MIXTRAL.read} experts_per_token",
    unread=f"{expert_weights.LOSSES} initial_context_length",
    wrong=wrong_gpt_oss,
    more=more_gpt_oss,
)
ALL_FAMILIES = (MIXTRAL, QWEN3_MOE, OLMOE, GPT_OSS)
