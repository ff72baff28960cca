"""transformers' GPT2LMHeadModel, which stores the weights of linear layers transposed."""

from functools import partial

from hpclm.interop.huggingface.family import LAYERNORM, Family, Json
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
    """A warning if two dropouts differ: hpclm has one setting for both."""
    embedded, added = (tree[name] for name in ("embd_pdrop", "resid_pdrop"))
    if embedded == added:
        return None
    return (
        f"embd_pdrop={embedded} and resid_pdrop={added}: hpclm has one model.dropout for both and uses resid_pdrop; give "
        "model.dropout=... for another value"
    )


FAMILY = Family(
    "GPT2LMHeadModel",
    "gpt2",
    keys={
        "layers": "n_layer",
        "hidden": "n_embd",
        "attention.heads": "n_head",
        "ffn": "n_inner",
        "context": "n_positions",
        "activation": "activation_function",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "resid_pdrop",
        "attention.dropout": "attn_pdrop",
        "tied": "tie_word_embeddings",
    },
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
