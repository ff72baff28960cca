"""transformers' GPT2LMHeadModel, which stores the weights of linear layers transposed."""

from collections.abc import Iterator

from hpclm.config import ModelConfig
from hpclm.interop.huggingface.family import LAYERNORM, REQUIRED, Family, Json
from hpclm.interop.rules import Rule, same, side_by_side, table, transposed

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


def remark(tree: Json) -> str | None:
    """hpclm has one setting for two dropouts."""
    embedded, added = (tree.get(name, 0.1) for name in ("embd_pdrop", "resid_pdrop"))
    if embedded == added:
        return None
    return (
        f"embd_pdrop={embedded} and resid_pdrop={added}: hpclm has one model.dropout for both, and takes resid_pdrop; give "
        "model.dropout=... for another"
    )


FAMILY = Family(
    "GPT2LMHeadModel",
    "gpt2",
    keys=dict(
        layers=("n_layer", REQUIRED),
        hidden=("n_embd", REQUIRED),
        heads=("n_head", REQUIRED),
        ffn=("n_inner", None),
        context=("n_positions", 1024),
        activation=("activation_function", "gelu_new"),
        norm_eps=("layer_norm_epsilon", 1e-5),
        dropout=("resid_pdrop", 0.1),
        attention_dropout=("attn_pdrop", 0.1),
        tied=("tie_word_embeddings", True),
    ),
    rules=rules,
    prefix="transformer.",
    needs=dict(positions=("learned",), **LAYERNORM),
    fixed=dict(scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,)),
    constant=lambda config: dict(embd_pdrop=config.dropout),
    buffers=(".attn.bias", ".attn.masked_bias"),
    aliases=dict(
        hidden_size="n_embd",
        max_position_embeddings="n_positions",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
    ),
    read="embd_pdrop",
    unread="reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
    remark=remark,
)
