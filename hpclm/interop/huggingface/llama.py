"""transformers' LlamaForCausalLM, and two like it: MistralForCausalLM, and Qwen3ForCausalLM with norms of q and k."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from hpclm.config import ModelConfig
from hpclm.interop.huggingface.family import PLAIN, REQUIRED, Family, Json, unsupported_rope
from hpclm.interop.rules import of_modules

MODULES = {
    "tokens": "model.embed_tokens",
    "norm1": "input_layernorm",
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": "mlp.down_proj",
    "norm": "model.norm",
    "output": "lm_head",
}


def wrong(
    tree: Json, width: int | None = None, mlp_bias: bool = False, window: int | None = None, switched: bool = False
) -> Iterator[str]:
    """What hpclm does not support; ``width`` and ``window``: head_dim and sliding_window if the keys are missing. ``switched``:
    use_sliding_window=false turns the window off."""
    yield from unsupported_rope(tree)
    hidden, heads, given = tree.get("hidden_size"), tree.get("num_attention_heads"), tree.get("head_dim", width)
    if None not in (hidden, heads, given) and given * heads != hidden:
        yield f"head_dim={given} x num_attention_heads={heads} is not hidden_size={hidden}, as it is in hpclm"
    attention, mlp = bool(tree.get("attention_bias")), bool(tree.get("mlp_bias")) and mlp_bias
    if attention != mlp:
        yield f"attention_bias={attention} and a bias in the MLP {mlp}, where hpclm has model.bias for both"
    off = switched and not tree.get("use_sliding_window", True)
    window = None if off else tree.get("sliding_window", window)
    if window is not None and not (isinstance(window, int) and window >= tree.get("max_position_embeddings", 2048)):
        yield f"sliding_window={window}, and hpclm attends to everything before a token"
    # a window that covers the context is none
    full = {"full_attention", "sliding_attention"} if window is not None else {"full_attention"}
    types = tree.get("layer_types") or []
    if not isinstance(types, list) or not {str(kind) for kind in types} <= full:
        yield f"layer_types={types}, and hpclm attends to everything before a token"


def more(config: ModelConfig) -> Iterator[str]:
    """A Qwen3 has no biases in its MLP."""
    if config.bias:
        yield "model.bias=true, where its MLP has none"


LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    keys=dict(
        layers=("num_hidden_layers", REQUIRED),
        hidden=("hidden_size", REQUIRED),
        heads=("num_attention_heads", REQUIRED),
        kv_heads=("num_key_value_heads", None),
        ffn=("intermediate_size", REQUIRED),
        context=("max_position_embeddings", 2048),
        rope_base=("rope_theta", 10000.0),
        norm_eps=("rms_norm_eps", 1e-6),
        activation=("hidden_act", "silu"),
        bias=("attention_bias", False),
        attention_dropout=("attention_dropout", 0.0),
        tied=("tie_word_embeddings", False),
    ),
    rules=partial(of_modules, modules=MODULES, layer="model.layers.{}."),
    prefix="model.",
    needs=dict(positions=("rope",), norm=("rmsnorm",), activation=("swiglu", "geglu"), **PLAIN),
    constant=lambda config: dict(head_dim=config.head_width, mlp_bias=config.bias),
    activations={"silu": "swiglu", "gelu": "geglu"},
    grouped=True,
    buffers=(".rotary_emb.inv_freq",),
    read="rope_parameters rope_scaling partial_rotary_factor head_dim mlp_bias sliding_window use_sliding_window layer_types",
    unread="pretraining_tp max_window_layers",
    wrong=partial(wrong, mlp_bias=True),
)
MISTRAL = replace(LLAMA, architecture="MistralForCausalLM", model_type="mistral", wrong=partial(wrong, window=4096))
QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    needs={**LLAMA.needs, "qk_norm": (True,)},
    constant=lambda config: dict(head_dim=config.head_width),
    more=more,
    wrong=partial(wrong, width=128, switched=True),
)
