"""transformers' BloomForCausalLM, and GPTNeoXForCausalLM without its parallel residual.

Their fused projection is (heads, 3, D), like ours without grouped queries.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from hpclm.config import ModelConfig
from hpclm.interop.huggingface import shape
from hpclm.interop.huggingface.family import LAYERNORM, Family, Json
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


def more(config: ModelConfig) -> Iterator[str]:
    """Reasons why a Bloom does not cover a network: its MLP has a fixed width."""
    if config.ffn_width != 4 * config.hidden:
        yield f"model.ffn={config.ffn}, but it needs 4 x model.hidden = {4 * config.hidden}"


def wrong(tree: Json) -> Iterator[str]:
    """Features of a GPT-NeoX that hpclm does not support."""
    if tree["use_parallel_residual"]:
        yield "use_parallel_residual=true, but in hpclm the MLP reads the residual stream after attention"


def neox_rope(tree: Json) -> dict[str, Any]:
    """Settings for rotary positions; their keys differ from other classes'."""
    tree = {key: value for key, value in tree.items() if key not in ("rope_theta", "partial_rotary_factor")}
    base = shape.number({"rotary_emb_base": 10000.0, **tree}, "rotary_emb_base")
    return shape.rope(tree, base, shape.number({"rotary_pct": 0.25, **tree}, "rotary_pct"))


BLOOM = Family(
    "BloomForCausalLM",
    "bloom",
    keys={
        "layers": "n_layer",
        "hidden": "hidden_size",
        "attention.heads": "n_head",
        "context": "seq_length",
        "norm_eps": "layer_norm_epsilon",
        "dropout": "hidden_dropout",
        "attention.dropout": "attention_dropout",
        "tied": "tie_word_embeddings",
    },
    rules=partial(of_modules, modules=BLOOM_MODULES, layer="transformer.h.{}."),
    prefix="transformer.",
    needs={**LAYERNORM, "positions": ("alibi",), "activation": ("gelu_tanh",), "embed_norm": (True,)},
    fixed=dict(apply_residual_connection_post_layernorm=(False,), slow_but_exact=(False,)),
    aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    unread="pretraining_tp attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi "
    "skip_bias_add skip_bias_add_qkv",
    more=more,
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
        "tied": "tie_word_embeddings",
    },
    rules=partial(of_modules, modules=NEOX_MODULES, layer="gpt_neox.layers.{}."),
    prefix="gpt_neox.",
    needs=dict(positions=("rope",), **LAYERNORM),
    fixed=dict(attention_bias=(True,)),
    constant=lambda config: dict(
        rotary_emb_base=config.rope.base,
        rotary_pct=config.rope.fraction,
        rope_scaling=shape.scaling(config) or None,
        use_parallel_residual=False,
    ),
    shape=neox_rope,
    covers=shape.ROPE_SETTINGS,
    read=f"{shape.ROPE} rotary_pct rotary_emb_base use_parallel_residual",
    unread="is_decoder",
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    wrong=wrong,
)
