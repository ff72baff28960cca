"""transformers' MixtralForCausalLM, Qwen3MoeForCausalLM, OlmoeForCausalLM and GptOssForCausalLM."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.interop.huggingface import expert_weights, llama, olmo, shape
from hpclm.interop.huggingface.completion import Keys
from hpclm.interop.rules import LOGICAL, ConversionRule, same

MIXTRAL_NAMES = expert_weights.Names(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{}.", up=("w1", "w3"), down=("w2",)
)
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
    constants={**llama.MISTRAL.constants, "experts.router_normalize": True},
)


def read_qwen3_moe(tree: Keys) -> dict[str, Any]:
    """Settings that depend on several keys: every decoder_sparse_step-th layer of a Qwen 3 has experts, except mlp_only_layers."""
    step = tree["decoder_sparse_step"]
    dense = tree["mlp_only_layers"]
    if step < 1:
        raise ConfigError(f"decoder_sparse_step={step} must be a whole number of at least 1")
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(tree["num_hidden_layers"])]
    return llama.read_windowed(tree, llama.ALL_ATTENTION, uniform=True) | expert_weights.mlp_pattern(sparse)


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_qwen3_moe() reads."""
    return llama.write_llama(config, llama.ALL_ATTENTION) | dict(
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
    fixed=dict(qkv_bias=(False,), use_qk_norm=(True,), shared_expert_intermediate_size=(0,)),
    write=write_qwen3_moe,
    read=read_qwen3_moe,
)
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
    constants={**olmo.OLMO2.constants, "norm_order": "pre"},
)
GPT_OSS_BIASES = ("attention_bias", "attention_bias", True)
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


def read_gpt_oss(tree: Keys) -> dict[str, Any]:
    """Settings that depend on several keys. The published models give the number of chosen experts twice."""
    one = tree["num_experts_per_tok"]
    other = tree.get("experts_per_token", one)
    if other != one:
        raise ConfigError(f"experts_per_token={other} and num_experts_per_tok={one}: two names of one setting")
    return llama.read_llama(tree, GPT_OSS_BIASES) | shape.layers(tree, turned=True)


def write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    """The keys that read_gpt_oss() reads."""
    return (
        llama.write_llama(config, GPT_OSS_BIASES)
        | {"layer_types": shape.layer_types(config), "sliding_window": config.attention.window or config.context}
        | shape.described_parameters(config)
    )


GPT_OSS = replace(
    MIXTRAL,
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    rules=gpt_oss_rules,
    constants={**MIXTRAL.constants, "attention.sinks": True, "experts.router_bias": True},
    activations={"silu": "swiglu_clamped"},
    write=write_gpt_oss,
    read=read_gpt_oss,
    fixed=dict(swiglu_alpha=(1.702,), swiglu_limit=(7.0,)),
    unread="initial_context_length",
)
ALL_FAMILIES = (MIXTRAL, QWEN3_MOE, OLMOE, GPT_OSS)
