"""Networks without a class in transformers: modeling_hpclm.py, written next to the weights, has the class."""

from collections.abc import Iterator
from pathlib import Path

from hpclm.config import ModelConfig
from hpclm.interop.huggingface.family import REQUIRED, Family, Json
from hpclm.interop.rules import Rule, kinds, norm_kinds, same, table

CODE = Path(__file__).with_name("modeling_hpclm.py")
KEYS = dict(
    layers="num_hidden_layers",
    hidden="hidden_size",
    heads="num_attention_heads",
    kv_heads="num_key_value_heads",
    ffn="intermediate_size",
    context="max_position_embeddings",
    positions="position_kind",
    rope_base="rotary_base",
    norm="norm_kind",
    norm_eps="norm_eps",
    activation="hidden_act",
    bias="use_bias",
    tied="tie_word_embeddings",
    embed_norm="embed_norm",
    embed_scale="embed_scale",
    qk_norm="qk_norm",
    dropout="hidden_dropout",
    attention_dropout="attention_dropout",
)
LINEAR = {"attention.qkv": "attention.qkv", "attention.out": "attention.out", "mlp.up": "up", "mlp.down": "down"}


def rules(config: ModelConfig) -> Iterator[Rule]:
    """Every weight."""
    yield table("tokens.weight", "model.tokens.weight", config)
    if config.positions == "learned":
        yield same("entry.table", "model.positions.weight")
    for kind in norm_kinds(config):
        if config.embed_norm:
            yield same(f"entry.norm.{kind}", f"model.embed_norm.{kind}")
        yield same(f"norm.{kind}", f"model.norm.{kind}")
    for index in range(config.layers):
        ours, theirs = f"block{index}", f"model.blocks.{index}"
        norms = ["norm1", "norm2", *(["attention.q_norm", "attention.k_norm"] if config.qk_norm else [])]
        for name in norms:
            for kind in norm_kinds(config):
                yield same(f"{ours}.{name}.{kind}", f"{theirs}.{name}.{kind}")
        for mine, name in LINEAR.items():
            for kind in kinds(config.bias):
                yield same(f"{ours}.{mine}.{kind}", f"{theirs}.{name}.{kind}")
    if not config.tied:
        yield table("output.weight", "output.weight", config)


def wrong(tree: Json) -> Iterator[str]:
    """transformers saves head_dim, which follows from two other keys."""
    heads, hidden = tree.get("num_attention_heads"), tree.get("hidden_size")
    given = tree.get("head_dim")
    if heads and hidden and given and given * heads != hidden:
        yield f"head_dim={given} x num_attention_heads={heads} is not hidden_size={hidden}"


FAMILY = Family(
    "HpclmForCausalLM",
    "hpclm",
    keys={ours: (theirs, REQUIRED) for ours, theirs in KEYS.items()},
    rules=rules,
    prefix="model.",
    needs=dict(block=("gpt",)),
    constant=lambda config: dict(
        auto_map={"AutoConfig": f"{CODE.stem}.HpclmConfig", "AutoModelForCausalLM": f"{CODE.stem}.HpclmForCausalLM"},
        use_cache=True,
    ),
    activations={name: name for name in ("gelu", "gelu_tanh", "relu", "swiglu", "geglu")},
    grouped=True,
    read="head_dim",
    unread="auto_map",
    wrong=wrong,
)
