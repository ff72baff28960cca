"""transformers' GPT2LMHeadModel, which stores the weights of linear layers transposed."""

from functools import partial

from hpclm.interop.huggingface.family import LAYERNORM, REQUIRED, Family, Json
from hpclm.interop.rules import of_modules

MODULES = {
    "tokens": "transformer.wte",
    "entry": "transformer.wpe",
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "norm": "transformer.ln_f",
    "output": "lm_head",
}


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
    rules=partial(of_modules, modules=MODULES, layer="transformer.h.{}.", in_out=True),
    prefix="transformer.",
    needs=dict(positions=("learned",), **LAYERNORM),
    fixed=dict(scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,)),
    constant=lambda config: dict(embd_pdrop=config.dropout, n_ctx=config.context),  # n_ctx: for llama.cpp's converter
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
