"""The model settings for Megatron's arguments."""

from argparse import Namespace
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.interop.megatron import experts, options
from hpclm.interop.megatron.options import argument

# BigScience's PositionEmbeddingType
ROTARY = 1
ALIBI = 3


def model_settings(args: Namespace) -> dict[str, Any]:
    """Model settings for ``args``; ConfigError if hpclm does not support the network."""
    wrong = [*options.of_network(args)]
    lacking = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if not argument(args, name)]
    wrong += [f"{name} is missing" for name in lacking]
    if not lacking:
        width = args.hidden_size // args.num_attention_heads
        if argument(args, "kv_channels", default=width) != width:
            wrong.append(f"kv_channels={args.kv_channels}, but hidden_size / num_attention_heads = {width}")
    if wrong:
        raise ConfigError(wrong)
    kv_heads = "num_query_groups" if argument(args, "group_query_attention", default=False) else "num_key_value_heads"
    values = {
        "layers": args.num_layers,
        "hidden": args.hidden_size,
        "attention.heads": args.num_attention_heads,
        "attention.kv_heads": argument(args, kv_heads),
        "ffn": argument(args, "ffn_hidden_size", default=4 * args.hidden_size),
        "context": argument(args, "max_position_embeddings", "seq_length"),
        "vocab_size": argument(args, "padded_vocab_size"),
        "positions": _positions(args),
        "norm": str(argument(args, "normalization", default="layernorm")).lower(),
        "norm_eps": argument(args, "norm_epsilon", "layernorm_epsilon", default=1e-5),
        "activation": _activation(args),
        "bias": argument(args, "add_bias_linear", default=True),
        "tied": not argument(args, "untie_embeddings_and_output_weights", default=False),
        "embed_norm": argument(args, "embed_layernorm", default=False),
        "attention.qk_norm": argument(args, "qk_layernorm", default=False),
        "dropout": argument(args, "hidden_dropout", default=0.0),
        "attention.dropout": argument(args, "attention_dropout", default=0.0),
    }
    if values["positions"] == "rope":
        values["rope.base"] = float(argument(args, "rotary_base", "rope_theta", default=10000.0))
    return {name: value for name, value in values.items() if value is not None} | experts.settings(args)


def swapped(args: Namespace | None) -> bool:
    """Whether the gate is the second half of a gated MLP's first weight, as with BigScience's --glu-activation."""
    return args is not None and argument(args, "glu_activation") is not None


def _positions(args: Namespace) -> str:
    kind = argument(args, "position_embedding_type", default="learned_absolute")
    if argument(args, "use_rotary_position_embeddings", default=False) or kind in ("rope", ROTARY):
        return "rope"
    if kind in ("alibi", ALIBI):
        return "alibi"
    if kind == "none" or not argument(args, "add_position_embedding", default=True):
        return "none"
    if kind in ("learned_absolute", "absolute", 2):
        return "learned"
    raise ConfigError(f"position_embedding_type={kind} is not supported")


def _activation(args: Namespace) -> str:
    """The activation's name. The fused bias-GELU and --openai-gelu are the tanh approximation."""
    glu = argument(args, "glu_activation")
    if glu or argument(args, "swiglu", default=False):
        return glu or "swiglu"
    if argument(args, "bias_gelu_fusion", default=False) or argument(args, "openai_gelu", default=False):
        return "gelu_tanh"
    return "gelu"
