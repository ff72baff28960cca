"""Networks without a class in transformers: the class is in modeling_hpclm.py, which is written next to the weights."""

from functools import partial
from pathlib import Path

from hpclm.interop.huggingface.family import Family
from hpclm.interop.rules import of_modules

CODE = Path(__file__).with_name("modeling_hpclm.py")
KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "attention.heads": "num_attention_heads",
    "attention.kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "context": "max_position_embeddings",
    "positions": "position_kind",
    "rope.base": "rotary_base",
    "norm": "norm_kind",
    "norm_eps": "norm_eps",
    "activation": "hidden_act",
    "bias": "use_bias",
    "embed_norm": "embed_norm",
    "embed_scale": "embed_scale",
    "attention.qk_norm": "qk_norm",
    "dropout": "hidden_dropout",
    "attention.dropout": "attention_dropout",
}
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "relu2", "swiglu", "geglu", "geglu_tanh")
MODULES = {
    "tokens": "model.tokens",
    "entry": "model.positions",
    "entry.norm": "model.embed_norm",
    "norm": "model.norm",
    "output": "output",
    "mlp.up": "up",
    "mlp.down": "down",
}
"""Maps our modules to theirs; all others have the same name."""


FAMILY = Family(
    "HpclmForCausalLM",
    "hpclm",
    keys=KEYS,
    rules=partial(of_modules, modules=MODULES, layer="model.blocks.{}."),
    prefix="model.",
    constants={},
    write=lambda config: dict(
        auto_map={"AutoConfig": f"{CODE.stem}.HpclmConfig", "AutoModelForCausalLM": f"{CODE.stem}.HpclmForCausalLM"},
        use_cache=True,
    ),
    activations={name: name for name in ACTIVATIONS},
    unread="auto_map",
)
