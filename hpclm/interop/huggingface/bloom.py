"""transformers' BloomForCausalLM: its fused projection is (heads, 3, D), as ours for plain attention."""

from collections.abc import Iterator
from typing import Any

from hpclm.config import ModelConfig
from hpclm.interop.huggingface.family import Family, Json, needed
from hpclm.interop.rules import Rule, same, table

NAMES = {
    "norm1": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.out": "self_attention.dense",
    "norm2": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def rules(config: ModelConfig) -> Iterator[Rule]:
    """Every weight."""
    yield table("tokens.weight", "transformer.word_embeddings.weight", config)
    for kind in ("weight", "bias"):
        yield same(f"entry.norm.{kind}", f"transformer.word_embeddings_layernorm.{kind}")
        for index in range(config.layers):
            for ours, theirs in NAMES.items():
                yield same(f"block{index}.{ours}.{kind}", f"transformer.h.{index}.{theirs}.{kind}")
        yield same(f"norm.{kind}", f"transformer.ln_f.{kind}")
    if not config.tied:
        yield table("output.weight", "lm_head.weight", config)


def described(config: ModelConfig) -> dict[str, Any]:
    """config.json of a network."""
    return dict(
        model_type="bloom",
        n_layer=config.layers,
        hidden_size=config.hidden,
        n_head=config.heads,
        seq_length=config.context,
        layer_norm_epsilon=config.norm_eps,
        hidden_dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )


def settings(tree: Json) -> dict[str, Any]:
    """Settings of the network that a config.json describes; old ones say n_embed and num_attention_heads."""
    names = dict(tree)
    names.setdefault("hidden_size", tree.get("n_embed"))
    names.setdefault("n_head", tree.get("num_attention_heads"))
    layers, hidden, heads = needed(names, "n_layer", "hidden_size", "n_head")
    return dict(
        layers=layers,
        hidden=hidden,
        heads=heads,
        context=tree.get("seq_length", 2048),
        positions="alibi",
        embed_norm=True,
        norm_eps=tree.get("layer_norm_epsilon", 1e-5),
        dropout=tree.get("hidden_dropout", 0.0),
        attention_dropout=tree.get("attention_dropout", 0.0),
        tied=tree.get("tie_word_embeddings", True),
    )


def more(config: ModelConfig) -> Iterator[str]:
    """What else stands in the way of a network."""
    if config.ffn_width != 4 * config.hidden:
        yield f"model.ffn={config.ffn}, where it has 4 x model.hidden = {4 * config.hidden}"


FAMILY = Family(
    "BloomForCausalLM",
    needs=dict(
        positions=("alibi",),
        norm=("layernorm",),
        activation=("gelu_tanh",),
        bias=(True,),
        embed_norm=(True,),
        embed_scale=(False,),
        qk_norm=(False,),
        block=("gpt",),
    ),
    fixed=dict(apply_residual_connection_post_layernorm=(False,)),
    described=described,
    settings=settings,
    rules=rules,
    prefix="transformer.",
    more=more,
)
