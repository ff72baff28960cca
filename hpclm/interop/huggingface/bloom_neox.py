"""transformers' BloomForCausalLM, and GPTNeoXForCausalLM without its parallel residual.

Their fused projection is (heads, 3, D), like ours without grouped queries.
"""

from collections.abc import Iterator
from functools import partial

from hpclm.config import ModelConfig
from hpclm.interop.huggingface.family import LAYERNORM, REQUIRED, Family, Json, unsupported_rope
from hpclm.interop.rules import Rule, same, table

LINEAR = {"attention.qkv": "query_key_value", "attention.out": "dense"}
NAMES = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def rules(
    config: ModelConfig, embedding: str, layers: str, attention: str, final_norm: str, output: str
) -> Iterator[Rule]:
    """How each weight is converted; the other arguments are names of modules."""
    names = NAMES | {ours: f"{attention}.{theirs}" for ours, theirs in LINEAR.items()}
    yield table("tokens.weight", f"{embedding}.weight", config)
    for kind in ("weight", "bias"):
        if config.embed_norm:
            yield same(f"entry.norm.{kind}", f"{embedding}_layernorm.{kind}")
        for index in range(config.layers):
            for ours, theirs in names.items():
                yield same(f"block{index}.{ours}.{kind}", f"{layers}.{index}.{theirs}.{kind}")
        yield same(f"norm.{kind}", f"{final_norm}.{kind}")
    if not config.tied:
        yield table("output.weight", f"{output}.weight", config)


def more(config: ModelConfig) -> Iterator[str]:
    """The MLP of a Bloom has a fixed width."""
    if config.ffn_width != 4 * config.hidden:
        yield f"model.ffn={config.ffn}, where it has 4 x model.hidden = {4 * config.hidden}"


def wrong(tree: Json) -> Iterator[str]:
    """What in a GPT-NeoX hpclm does not support."""
    yield from unsupported_rope(tree, "rotary_pct", absent=0.25)
    if tree.get("use_parallel_residual", True):
        yield "use_parallel_residual=true, and in hpclm the MLP reads what attention has added to"


BLOOM = Family(
    "BloomForCausalLM",
    "bloom",
    keys=dict(
        layers=("n_layer", REQUIRED),
        hidden=("hidden_size", REQUIRED),
        heads=("n_head", REQUIRED),
        context=("seq_length", 2048),
        norm_eps=("layer_norm_epsilon", 1e-5),
        dropout=("hidden_dropout", 0.0),
        attention_dropout=("attention_dropout", 0.0),
        tied=("tie_word_embeddings", True),
    ),
    rules=partial(
        rules,
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        attention="self_attention",
        final_norm="transformer.ln_f",
        output="lm_head",
    ),
    prefix="transformer.",
    needs={**LAYERNORM, "positions": ("alibi",), "activation": ("gelu_tanh",), "embed_norm": (True,)},
    fixed=dict(apply_residual_connection_post_layernorm=(False,)),
    aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    unread="pretraining_tp slow_but_exact attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi "
    "skip_bias_add skip_bias_add_qkv",
    more=more,
)
NEOX = Family(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    keys=dict(
        layers=("num_hidden_layers", REQUIRED),
        hidden=("hidden_size", REQUIRED),
        heads=("num_attention_heads", REQUIRED),
        ffn=("intermediate_size", REQUIRED),
        context=("max_position_embeddings", 2048),
        rope_base=("rotary_emb_base", 10000.0),
        activation=("hidden_act", "gelu"),
        norm_eps=("layer_norm_eps", 1e-5),
        dropout=("hidden_dropout", 0.0),
        attention_dropout=("attention_dropout", 0.0),
        tied=("tie_word_embeddings", False),
    ),
    rules=partial(
        rules,
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        attention="attention",
        final_norm="gpt_neox.final_layer_norm",
        output="embed_out",
    ),
    prefix="gpt_neox.",
    needs=dict(positions=("rope",), **LAYERNORM),
    fixed=dict(attention_bias=(True,)),
    constant=lambda config: dict(rotary_pct=1.0, use_parallel_residual=False),
    read="rope_parameters rope_scaling partial_rotary_factor rotary_pct use_parallel_residual",
    unread="is_decoder",
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    wrong=wrong,
)
