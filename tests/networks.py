"""Networks of every kind that the settings describe, each small enough for a test in milliseconds."""

import math
import random

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.attention import LAYER_KINDS

SHAPE = {"vocab_size": 257, "vocab_multiple": 8, "layers": 3, "hidden": 32, "attention.heads": 4, "context": 24}
LLAMA = {
    **SHAPE,
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tied": False,
    "attention.kv_heads": 2,
    "ffn": 48,
}
WINDOW = 6
SCALINGS = {
    "linear": dict(factor="4"),
    "dynamic": dict(factor="4", original_max_position_embeddings="8"),
    "yarn": dict(factor="4", original_max_position_embeddings="8"),
    "llama3": dict(factor="8", original_max_position_embeddings="8", low_freq_factor="1", high_freq_factor="4"),
    "longrope": dict(
        original_max_position_embeddings="8", short_factor="[1, 1.1, 1.2, 1.3]", long_factor="[1, 2, 3, 4]"
    ),
}


def patterned(*kinds, **more):
    """Settings of layers of these kinds."""
    return {
        "attention.pattern": [*kinds],
        **({"attention.window": WINDOW} if any("window" in kind for kind in kinds) else {}),
        **more,
    }


def scaled(kind):
    return {**LLAMA, "rope.scaling": dict(rope_type=kind, **SCALINGS[kind])}


LATENT = {
    **{key: value for key, value in LLAMA.items() if key != "attention.kv_heads"},
    "attention.head_dim": 8,
    "attention.latent.kv_rank": 12,
    "attention.latent.rope_dim": 8,
}
POSITIONS = ("learned", "sinusoidal", "rope", "alibi", "none")
NETWORKS = {
    **{positions: dict(SHAPE, positions=positions) for positions in POSITIONS},
    **{f"{positions}, windows": dict(SHAPE, **patterned("window", positions=positions)) for positions in POSITIONS},
    **{
        f"{positions}, some windows": dict(SHAPE, **patterned("full", "window", positions=positions))
        for positions in POSITIONS
    },
    **{kind: dict(SHAPE, **patterned(kind, positions="rope")) for kind in LAYER_KINDS if "nope" in kind},
    "window and nope": dict(LLAMA, **patterned("window", "nope")),
    "window and window_nope": dict(LLAMA, **patterned("window", "window_nope")),
    "every kind of layer": dict(LLAMA, layers=4, **patterned(*LAYER_KINDS)),
    "Mistral": dict(LLAMA, **patterned("window")),
    **{f"llama, {order}": dict(LLAMA, norm_order=order) for order in ("pre", "post", "sandwich")},
    **{f"gpt2, {order}": dict(SHAPE, norm_order=order) for order in ("post", "sandwich")},
    "score cap": {**LLAMA, "attention.score_cap": 2.0},
    "sinks": {**LLAMA, "attention.sinks": True},
    "score cap, sinks, windows": {**LLAMA, "attention.score_cap": 2.0, "attention.sinks": True, **patterned("window")},
    "alibi, sinks, score cap": {**SHAPE, "positions": "alibi", "attention.sinks": True, "attention.score_cap": 2.0},
    "alibi, sinks, windows": {**SHAPE, "attention.sinks": True, **patterned("window", positions="alibi")},
    "multipliers": {
        **LLAMA,
        "embed_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logit_multiplier": 0.25,
        "attention.score_scale": 0.2,
    },
    "logit cap": dict(LLAMA, logit_cap=2.0, logit_multiplier=0.5),
    "logits in fp32": dict(LLAMA, logits_fp32=True, logit_cap=2.0),
    "embedding": dict(SHAPE, embed_norm=True, embed_scale=True),
    "norms of q and k": {**LLAMA, "attention.qk_norm": True},
    "norms of q and k, layernorm": {**SHAPE, "attention.qk_norm": True},
    "norms of projections": {**LLAMA, "attention.qk_norm": True, "attention.qk_norm_span": "projection"},
    "xielu": dict(LLAMA, activation="xielu"),
    "relu2": dict(SHAPE, activation="relu2"),
    "geglu_tanh": dict(LLAMA, activation="geglu_tanh"),
    "part of a head": {**LLAMA, "rope.fraction": 0.5},
    "wide heads": {**LLAMA, "attention.head_dim": 16},
    "some biases": {**LLAMA, "attention.qkv_bias": True, "mlp_bias": True},
    **{f"rope, {kind}": scaled(kind) for kind in SCALINGS},
    "latent": {
        **LATENT,
        "attention.latent.q_rank": 20,
        "attention.latent.value_dim": 6,
        "attention.qkv_bias": True,
        "attention.out_bias": True,
    },
    "latent, some windows": {**LATENT, "attention.score_cap": 2.0, **patterned("window", "full", "nope")},
    "latent, yarn": {**LATENT, "rope.scaling": scaled("yarn")["rope.scaling"], "attention.score_scale": 0.3},
    "windows with a base of their own": {
        **scaled("yarn"),
        "rope.window_base": 500.0,
        "rope.window_scaled": False,
        **patterned("window", "full"),
    },
}


def drawn(seed):
    """A valid network, each of whose settings is drawn."""
    draw = random.Random(seed)
    while True:
        try:
            return valid(_drawn(draw))
        except ConfigError:
            continue


def valid(network):
    ModelConfig.of(network)
    return network


def _drawn(draw):
    def some(value, part=0.3):
        return value if draw.random() < part else None

    heads, positions = draw.choice([2, 4, 6]), draw.choice(POSITIONS)
    rope, norm = positions == "rope", draw.choice(["layernorm", "rmsnorm"])
    width = draw.choice([8, 16])
    kinds = [*LAYER_KINDS] if rope else ["full", "window"]
    network = {
        **SHAPE,
        "layers": draw.randint(1, 4),
        "attention.heads": heads,
        "hidden": heads * draw.choice([8, 12]),
        "attention.head_dim": width,
        "attention.kv_heads": draw.choice([None, 1, heads // 2]),
        "ffn": draw.choice([None, 40]),
        "positions": positions,
        "norm": norm,
        "norm_order": draw.choice(["pre", "post", "sandwich"]),
        "norm_eps": draw.choice([1e-6, 1e-3]),
        "activation": draw.choice(["gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu", "geglu", "geglu_tanh"]),
        "bias": draw.random() < 0.5,
        "attention.qkv_bias": some(draw.random() < 0.5),
        "attention.out_bias": some(draw.random() < 0.5),
        "mlp_bias": some(draw.random() < 0.5),
        "tied": draw.random() < 0.5,
        "embed_norm": draw.random() < 0.2,
        "embed_scale": draw.random() < 0.2,
        "attention.qk_norm": draw.random() < 0.4,
        "attention.score_scale": some(draw.uniform(0.1, 0.6)),
        "attention.score_cap": some(draw.uniform(1, 5)),
        "attention.sinks": draw.random() < 0.2,
        "embed_multiplier": some(3.0) or 1.0,
        "residual_multiplier": some(0.5) or 1.0,
        "logit_multiplier": some(0.25) or 1.0,
        "logit_cap": some(draw.uniform(1, 5)),
        **patterned(*draw.choices(kinds, k=draw.randint(1, 4))),
    }
    if network["attention.qk_norm"] and norm == "rmsnorm":
        network["attention.qk_norm_span"] = draw.choice(["head", "projection"])
    if rope:
        network |= {"rope.base": draw.choice([500.0, 10000.0]), "rope.fraction": draw.choice([1.0, 0.5])}
        kind = draw.choice([None, *SCALINGS])
        if kind is not None:
            network["rope.scaling"] = dict(rope_type=kind, **SCALINGS[kind])
        if kind == "longrope":
            count = int(width * network["rope.fraction"]) // 2
            for name, slope in (("short_factor", 0.1), ("long_factor", 1.0)):
                network["rope.scaling"][name] = str([1 + slope * i for i in range(count)])
        if "attention.window" in network and draw.random() < 0.5:
            network |= {"rope.window_base": some(700.0), "rope.window_scaled": draw.random() < 0.5}
    return network


GPT = dict(SHAPE, bias=True)
GATES = ["swiglu", "geglu", "geglu_tanh"]
ALIKE = {
    "gpt2": lambda draw: dict(
        GPT, tied=draw.random() < 0.5, activation=draw.choice(["gelu", "gelu_tanh", "relu", "relu2"])
    ),
    "bloom": lambda draw: dict(GPT, positions="alibi", embed_norm=True),
    "neox": lambda draw: {
        **GPT,
        "positions": "rope",
        "tied": draw.random() < 0.5,
        "rope.fraction": draw.choice([0.5, 1.0]),
    },
    "llama": lambda draw: dict(LLAMA, activation=draw.choice(GATES), bias=draw.random() < 0.5),
    "mistral": lambda draw: dict(LLAMA, **patterned("window")),
    "qwen2": lambda draw: {**LLAMA, "attention.qkv_bias": True, **patterned(*draw.choices(["full", "window"], k=3))},
    "qwen3": lambda draw: {**LLAMA, "attention.qk_norm": True, **patterned(*draw.choices(["full", "window"], k=3))},
    "smollm3": lambda draw: dict(LLAMA, **patterned(*draw.choices(["full", "nope"], k=3))),
    "smollm3, windows": lambda draw: dict(LLAMA, **patterned(*draw.choices(["full", "window_nope"], k=4))),
    "granite": lambda draw: {
        **LLAMA,
        "embed_multiplier": draw.choice([1.0, 6.0]),
        "residual_multiplier": draw.choice([1.0, 0.3]),
        "logit_multiplier": draw.choice([0.5, 0.125]),
        "attention.score_scale": draw.choice([None, 0.1]),
    },
    "arcee": lambda draw: dict(LLAMA, activation="relu2"),
    "apertus": lambda draw: {**LLAMA, "activation": "xielu", "attention.qk_norm": True},
    "phi3": lambda draw: {**LLAMA, "rope.fraction": 0.5},
    "olmo": lambda draw: {
        **LLAMA,
        "norm_order": "post",
        "attention.qk_norm": True,
        "attention.qk_norm_span": "projection",
        **patterned(
            *draw.choices(["full", "attention.window"], k=4), **{"rope.window_base": draw.choice([None, 700.0])}
        ),
    },
    "gemma": lambda draw: {
        **LLAMA,
        "norm_order": "sandwich",
        "activation": "geglu_tanh",
        "embed_scale": True,
        "attention.qk_norm": draw.random() < 0.5,
        "attention.score_scale": draw.choice([None, 12**-0.5, 0.3]),
        "attention.score_cap": draw.choice([None, 3.0]),
        "logit_cap": draw.choice([None, 3.0]),
        **patterned(*draw.choices(["full", "window"], k=3)),
    },
    "glm4": lambda draw: {
        **LLAMA,
        "norm_order": "sandwich",
        "attention.qkv_bias": draw.random() < 0.5,
        "rope.fraction": 0.5,
    },
    "nanochat": lambda draw: {
        **LLAMA,
        "activation": "relu2",
        "embed_norm": True,
        "attention.qk_norm": True,
        "logit_cap": 3.0,
    },
    "own": lambda draw: dict(SHAPE, positions=draw.choice(POSITIONS), embed_scale=True, activation=draw.choice(GATES)),
}


def exportable(seed):
    """A network like those of one of transformers' classes."""
    draw = random.Random(seed)
    while True:
        name = draw.choice([*ALIKE])
        network = ALIKE[name](draw)
        network |= dict(layers=draw.randint(1, 4), norm_eps=draw.choice([1e-6, 1e-4]))
        if "attention.kv_heads" in network:
            network |= {"attention.kv_heads": draw.choice([None, 1, 2, 4]), "tied": draw.random() < 0.4}
            network |= (
                {"attention.head_dim": draw.choice([None, 16])} if name not in ("phi3", "olmo", "nanochat") else {}
            )
        kind = draw.choice([None, None, *SCALINGS])
        if network.get("positions") == "rope" and kind and name != "own":
            parameters = dict(SCALINGS[kind])
            if kind == "longrope":
                count = int((network.get("attention.head_dim") or 8) * network.get("rope.fraction", 1.0)) // 2
                for key, slope in (("short_factor", 0.1), ("long_factor", 1.0)):
                    parameters[key] = str([1 + slope * i for i in range(count)])
            if kind == "yarn":
                parameters |= draw.choice(
                    [
                        {},
                        {"truncate": "false"},
                        {"beta_fast": "1", "beta_slow": "8"},
                        {"mscale": "0.7", "mscale_all_dim": "0.4"},
                    ]
                )
            network |= {"rope.scaling": dict(rope_type=kind, **parameters)}
            if "attention.window" in network and draw.random() < 0.5:
                network["rope.window_scaled"] = False
        network = {
            key: value for key, value in network.items() if key != "rope.window_base" or network.get("attention.window")
        }
        try:
            return valid(network)
        except ConfigError:
            continue


def sizes(config):
    """Values of all weights together, by the shapes that the model declares."""
    from hpclm.interop.rules import placements

    return sum(math.prod(placement.shape) for placement in placements(config).values())
