"""transformers' GPTNeoXForCausalLM without its parallel residual: rotary positions with LayerNorm and biases."""

from collections.abc import Iterator
from typing import Any

from hpclm.config import ModelConfig
from hpclm.interop.huggingface.family import Family, Json, activation, needed
from hpclm.interop.huggingface.gpt2 import ACTIVATIONS
from hpclm.interop.huggingface.rope import base, turned
from hpclm.interop.rules import Rule, same, table

NAMES = {
    "norm1": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.out": "attention.dense",
    "norm2": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def rules(config: ModelConfig) -> Iterator[Rule]:
    """Every weight."""
    yield table("tokens.weight", "gpt_neox.embed_in.weight", config)
    for kind in ("weight", "bias"):
        for index in range(config.layers):
            for ours, theirs in NAMES.items():
                yield same(f"block{index}.{ours}.{kind}", f"gpt_neox.layers.{index}.{theirs}.{kind}")
        yield same(f"norm.{kind}", f"gpt_neox.final_layer_norm.{kind}")
    if not config.tied:
        yield table("output.weight", "embed_out.weight", config)


def described(config: ModelConfig) -> dict[str, Any]:
    """config.json of a network."""
    return dict(
        model_type="gpt_neox",
        num_hidden_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        intermediate_size=config.ffn_width,
        max_position_embeddings=config.context,
        hidden_act={ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}[config.activation],
        layer_norm_eps=config.norm_eps,
        rotary_pct=1.0,
        rotary_emb_base=config.rope_base,
        use_parallel_residual=False,
        hidden_dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )


def settings(tree: Json) -> dict[str, Any]:
    """Settings of the network that a config.json describes."""
    layers, hidden, heads, inner = needed(
        tree, "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"
    )
    return dict(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=inner,
        context=tree.get("max_position_embeddings", 2048),
        positions="rope",
        rope_base=base(tree, "rotary_emb_base"),
        activation=activation(tree, "hidden_act", "gelu", ACTIVATIONS),
        norm_eps=tree.get("layer_norm_eps", 1e-5),
        dropout=tree.get("hidden_dropout", 0.0),
        attention_dropout=tree.get("attention_dropout", 0.0),
        tied=tree.get("tie_word_embeddings", False),
    )


def wrong(tree: Json) -> Iterator[str]:
    """What is no network of ours."""
    yield from turned(tree, "rotary_pct", absent=0.25)
    if tree.get("use_parallel_residual", True):
        yield "use_parallel_residual=true, and in hpclm the MLP reads what attention has added to"


FAMILY = Family(
    "GPTNeoXForCausalLM",
    needs=dict(
        positions=("rope",),
        norm=("layernorm",),
        activation=("gelu", "gelu_tanh", "relu"),
        bias=(True,),
        embed_norm=(False,),
        embed_scale=(False,),
        qk_norm=(False,),
        block=("gpt",),
    ),
    fixed=dict(attention_bias=(True,)),
    described=described,
    settings=settings,
    rules=rules,
    prefix="gpt_neox.",
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    wrong=wrong,
)
