"""transformers' GPT2LMHeadModel, BloomForCausalLM, and GPTNeoXForCausalLM without its parallel residual."""

from functools import partial

from hpclm.interop.huggingface import shape
from hpclm.interop.huggingface.family import LAYERNORM, Family
from hpclm.interop.rules import of_modules

GPT2_MODULES = {
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
GPT2 = Family(
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
    rules=partial(of_modules, modules=GPT2_MODULES, layer="transformer.h.{}.", in_out=True),
    prefix="transformer.",
    constants=dict(positions="learned", **LAYERNORM),
    parts=(shape.ONE_DROPOUT,),
    write=lambda config: dict(n_ctx=config.context),  # for llama.cpp's converter
    buffers=(".attn.bias", ".attn.masked_bias"),
    unread="n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
)
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
    read=shape.rope,
    write=lambda config: dict(
        rotary_emb_base=config.rope.base,
        rotary_pct=config.rope.fraction,
        rope_scaling=shape.scaling(config) or None,
        use_parallel_residual=False,
    ),
    fixed=dict(use_parallel_residual=(False,)),
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
ALL_FAMILIES = (GPT2, BLOOM, NEOX)
