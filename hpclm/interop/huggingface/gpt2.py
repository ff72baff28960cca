"""transformers' GPT2LMHeadModel, whose linear layers are stored transposed."""

from collections.abc import Iterator
from typing import Any

from hpclm.config import ModelConfig
from hpclm.interop.huggingface.family import Family, Json, activation, needed
from hpclm.interop.rules import Rule, same, side_by_side, table, transposed

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
NAMES = {"attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}


def rules(config: ModelConfig) -> Iterator[Rule]:
    """Every weight."""
    yield table("tokens.weight", "transformer.wte.weight", config)
    yield same("entry.table", "transformer.wpe.weight")
    for index in range(config.layers):
        ours, theirs = f"block{index}", f"transformer.h.{index}"
        for kind in ("weight", "bias"):
            yield same(f"{ours}.norm1.{kind}", f"{theirs}.ln_1.{kind}")
            yield side_by_side(f"{ours}.attention.qkv.{kind}", f"{theirs}.attn.c_attn.{kind}", config)
            yield same(f"{ours}.norm2.{kind}", f"{theirs}.ln_2.{kind}")
            for mine, name in NAMES.items():
                stored = transposed if kind == "weight" else same
                yield stored(f"{ours}.{mine}.{kind}", f"{theirs}.{name}.{kind}")
    for kind in ("weight", "bias"):
        yield same(f"norm.{kind}", f"transformer.ln_f.{kind}")
    if not config.tied:
        yield table("output.weight", "lm_head.weight", config)


def described(config: ModelConfig) -> dict[str, Any]:
    """config.json of a network."""
    return dict(
        model_type="gpt2",
        n_layer=config.layers,
        n_embd=config.hidden,
        n_head=config.heads,
        n_inner=config.ffn_width,
        n_positions=config.context,
        activation_function={ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}[config.activation],
        layer_norm_epsilon=config.norm_eps,
        embd_pdrop=config.dropout,
        resid_pdrop=config.dropout,
        attn_pdrop=config.attention_dropout,
    )


def settings(tree: Json) -> dict[str, Any]:
    """Settings of the network that a config.json describes."""
    layers, hidden, heads = needed(tree, "n_layer", "n_embd", "n_head")
    return dict(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=tree.get("n_inner") or 4 * hidden,
        context=tree.get("n_positions", 1024),
        activation=activation(tree, "activation_function", "gelu_new", ACTIVATIONS),
        norm_eps=tree.get("layer_norm_epsilon", 1e-5),
        dropout=tree.get("resid_pdrop", 0.1),
        attention_dropout=tree.get("attn_pdrop", 0.1),
        tied=tree.get("tie_word_embeddings", True),
    )


FAMILY = Family(
    "GPT2LMHeadModel",
    needs=dict(
        positions=("learned",),
        norm=("layernorm",),
        activation=("gelu", "gelu_tanh", "relu"),
        bias=(True,),
        embed_norm=(False,),
        embed_scale=(False,),
        qk_norm=(False,),
        block=("gpt",),
    ),
    fixed=dict(scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,)),
    described=described,
    settings=settings,
    rules=rules,
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)
