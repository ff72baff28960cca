"""transformers' BloomForCausalLM, and GPTNeoXForCausalLM without its parallel residual.

Their fused projection is (heads, 3, D), like ours without grouped queries.
"""

from functools import partial
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.interop.huggingface import shape
from hpclm.interop.huggingface.completion import Keys
from hpclm.interop.huggingface.family import LAYERNORM, Family
from hpclm.interop.rules import of_modules

IN_BLOCK = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
BLOOM_MODULES = IN_BLOCK | {
    "tokens": "transformer.word_embeddings",
    "entry.norm": "transformer.word_embeddings_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.out": "self_attention.dense",
    "norm": "transformer.ln_f",
    "output": "lm_head",
}
NEOX_MODULES = IN_BLOCK | {
    "tokens": "gpt_neox.embed_in",
    "attention.qkv": "attention.query_key_value",
    "attention.out": "attention.dense",
    "norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
}


def read_neox(tree: Keys) -> dict[str, Any]:
    """Settings that depend on several keys."""
    if tree["use_parallel_residual"]:
        raise ConfigError("use_parallel_residual=true, but in hpclm the MLP reads the residual stream after attention")
    return shape.rope(tree)


BLOOM = Family(
    "BloomForCausalLM",
    "bloom",
    keys={
        "layers": "n_layer",
        "hidden": "hidden_size",
        "attention.heads": "n_head",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "hidden_dropout",
        "attention.dropout": "attention_dropout",
    },
    rules=partial(of_modules, modules=BLOOM_MODULES, layer="transformer.h.{}."),
    prefix="transformer.",
    constants={**LAYERNORM, "positions": "alibi", "activation": "gelu_tanh", "embed_norm": True},
    read=lambda tree: dict(context=tree.get("seq_length", 2048)),  # transformers does not read it
    write=lambda config: dict(seq_length=config.context),
    unread="attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add skip_bias_add_qkv",
)
NEOX = Family(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    keys={
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "attention.heads": "num_attention_heads",
        "ffn": "intermediate_size",
        "context": "max_position_embeddings",
        "activation": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "dropout": "hidden_dropout",
        "attention.dropout": "attention_dropout",
    },
    rules=partial(of_modules, modules=NEOX_MODULES, layer="gpt_neox.layers.{}."),
    prefix="gpt_neox.",
    constants=dict(positions="rope", **LAYERNORM),
    write=lambda config: dict(
        rotary_emb_base=config.rope.base,
        rotary_pct=config.rope.fraction,
        rope_scaling=shape.scaling(config) or None,
        use_parallel_residual=False,
    ),
    read=read_neox,
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
