"""transformers' GPT2LMHeadModel, which stores the weights of linear layers transposed."""

import logging
from functools import partial
from typing import Any

from hpclm.interop.huggingface.completion import Keys
from hpclm.interop.huggingface.family import LAYERNORM, Family
from hpclm.interop.rules import of_modules

log = logging.getLogger(__name__)
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


def read(tree: Keys) -> dict[str, Any]:
    """No setting, but a warning if two dropouts differ."""
    embedded, added = (tree[name] for name in ("embd_pdrop", "resid_pdrop"))
    if embedded != added:
        log.warning(
            "embd_pdrop=%s and resid_pdrop=%s: hpclm has one model.dropout for both and uses resid_pdrop; give model.dropout=... for "
            "another value",
            embedded,
            added,
        )
    return {}


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
    },
    rules=partial(of_modules, modules=MODULES, layer="transformer.h.{}.", in_out=True),
    prefix="transformer.",
    constants=dict(positions="learned", **LAYERNORM),
    read=read,
    write=lambda config: dict(embd_pdrop=config.dropout, n_ctx=config.context),  # n_ctx: for llama.cpp's converter
    buffers=(".attn.bias", ".attn.masked_bias"),
    unread="n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
)
