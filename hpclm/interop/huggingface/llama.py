"""transformers' LlamaForCausalLM, and two like it: MistralForCausalLM, and Qwen3ForCausalLM with its norms of q and k."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hpclm.config import ModelConfig
from hpclm.interop.huggingface.family import Family, Json, activation, needed
from hpclm.interop.huggingface.rope import base, turned
from hpclm.interop.rules import Rule, kinds, same, separate, stacked, table

ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu"}


def rules(config: ModelConfig) -> Iterator[Rule]:
    """Every weight."""
    yield table("tokens.weight", "model.embed_tokens.weight", config)
    for index in range(config.layers):
        ours, theirs = f"block{index}", f"model.layers.{index}"
        yield same(f"{ours}.norm1.weight", f"{theirs}.input_layernorm.weight")
        yield same(f"{ours}.norm2.weight", f"{theirs}.post_attention_layernorm.weight")
        for kind in kinds(config.bias):
            qkv = [f"{theirs}.self_attn.{x}_proj.{kind}" for x in "qkv"]
            yield separate(f"{ours}.attention.qkv.{kind}", qkv, config)
            yield same(f"{ours}.attention.out.{kind}", f"{theirs}.self_attn.o_proj.{kind}")
            yield stacked(f"{ours}.mlp.up.{kind}", [f"{theirs}.mlp.{x}_proj.{kind}" for x in ("gate", "up")])
            yield same(f"{ours}.mlp.down.{kind}", f"{theirs}.mlp.down_proj.{kind}")
        if config.qk_norm:
            for x in "qk":
                yield same(f"{ours}.attention.{x}_norm.weight", f"{theirs}.self_attn.{x}_norm.weight")
    yield same("norm.weight", "model.norm.weight")
    if not config.tied:
        yield table("output.weight", "lm_head.weight", config)


def described(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """config.json of a network."""
    bias = dict(attention_bias=config.bias) | (dict(mlp_bias=config.bias) if model_type == "llama" else {})
    return dict(
        model_type=model_type,
        num_hidden_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        num_key_value_heads=config.groups,
        head_dim=config.head_width,
        intermediate_size=config.ffn_width,
        max_position_embeddings=config.context,
        hidden_act={ours: theirs for theirs, ours in ACTIVATIONS.items()}[config.activation],
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_base,
        attention_dropout=config.attention_dropout,
        **bias,
    )


def settings(tree: Json, qk_norm: bool = False) -> dict[str, Any]:
    """Settings of the network that a config.json describes."""
    layers, hidden, heads, inner = needed(
        tree, "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"
    )
    return dict(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=tree.get("num_key_value_heads") or heads,
        ffn=inner,
        context=tree.get("max_position_embeddings", 2048),
        positions="rope",
        rope_base=base(tree),
        norm="rmsnorm",
        norm_eps=tree.get("rms_norm_eps", 1e-6),
        activation=activation(tree, "hidden_act", "silu", ACTIVATIONS),
        bias=bool(tree.get("attention_bias", False)),
        qk_norm=qk_norm,
        attention_dropout=tree.get("attention_dropout", 0.0),
        tied=tree.get("tie_word_embeddings", False),
    )


def wrong(tree: Json, width: int | None = None, mlp_bias: bool = False, window: int | None = None) -> Iterator[str]:
    """What is no network of ours; ``width`` and ``window``: what the absence of head_dim and sliding_window means."""
    yield from turned(tree)
    hidden, heads = needed(tree, "hidden_size", "num_attention_heads")
    given = tree.get("head_dim", width)
    if given is not None and given * heads != hidden:
        yield f"head_dim={given} x num_attention_heads={heads} is not hidden_size={hidden}, as it is in hpclm"
    attention, mlp = bool(tree.get("attention_bias")), bool(tree.get("mlp_bias")) and mlp_bias
    if attention != mlp:
        yield f"attention_bias={attention} and a bias in the MLP {mlp}, where hpclm has model.bias for both"
    window = tree.get("sliding_window", window) if tree.get("use_sliding_window", True) else None
    if window is not None and window < tree.get("max_position_embeddings", 2048):
        yield f"sliding_window={window}, and hpclm attends to everything before a token"


def more(config: ModelConfig) -> Iterator[str]:
    """What else stands in the way of a Qwen3."""
    if config.bias:
        yield "model.bias=true, where its MLP has none"


LLAMA = Family(
    "LlamaForCausalLM",
    needs=dict(
        positions=("rope",),
        norm=("rmsnorm",),
        activation=("swiglu", "geglu"),
        embed_norm=(False,),
        embed_scale=(False,),
        qk_norm=(False,),
        block=("gpt",),
    ),
    fixed={},
    described=partial(described, model_type="llama"),
    settings=settings,
    rules=rules,
    prefix="model.",
    grouped=True,
    buffers=(".rotary_emb.inv_freq",),
    wrong=partial(wrong, mlp_bias=True),
)
MISTRAL = replace(LLAMA, architecture="MistralForCausalLM", wrong=partial(wrong, window=4096))
QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    needs={**LLAMA.needs, "qk_norm": (True,)},
    described=partial(described, model_type="qwen3"),
    settings=partial(settings, qk_norm=True),
    more=more,
    wrong=partial(wrong, width=128),
)
