"""Networks of every kind that the settings describe, each small enough for a test in milliseconds."""

import math
import random

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.model import LAYER_KINDS

SHAPE = dict(vocab_size=257, vocab_multiple=8, layers=3, hidden=32, heads=4, context=24)
LLAMA = dict(SHAPE, positions="rope", norm="rmsnorm", activation="swiglu", bias=False, tied=False, kv_heads=2, ffn=48)
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
    return dict(pattern=[*kinds], **({"window": WINDOW} if any("window" in kind for kind in kinds) else {}), **more)


def scaled(kind):
    return dict(LLAMA, rope_scaling=dict(rope_type=kind, **SCALINGS[kind]))


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
    "score cap": dict(LLAMA, score_cap=2.0),
    "sinks": dict(LLAMA, attention_sinks=True),
    "score cap, sinks, windows": dict(LLAMA, score_cap=2.0, attention_sinks=True, **patterned("window")),
    "alibi, sinks, score cap": dict(SHAPE, positions="alibi", attention_sinks=True, score_cap=2.0),
    "alibi, sinks, windows": dict(SHAPE, attention_sinks=True, **patterned("window", positions="alibi")),
    "multipliers": dict(LLAMA, embed_multiplier=3.0, residual_multiplier=0.5, logit_multiplier=0.25, score_scale=0.2),
    "logit cap": dict(LLAMA, logit_cap=2.0, logit_multiplier=0.5),
    "logits in fp32": dict(LLAMA, logits_fp32=True, logit_cap=2.0),
    "embedding": dict(SHAPE, embed_norm=True, embed_scale=True),
    "norms of q and k": dict(LLAMA, qk_norm=True),
    "norms of q and k, layernorm": dict(SHAPE, qk_norm=True),
    "norms of projections": dict(LLAMA, qk_norm=True, qk_norm_span="projection"),
    "xielu": dict(LLAMA, activation="xielu"),
    "relu2": dict(SHAPE, activation="relu2"),
    "geglu_tanh": dict(LLAMA, activation="geglu_tanh"),
    "part of a head": dict(LLAMA, rope_fraction=0.5),
    "wide heads": dict(LLAMA, head_dim=16),
    "some biases": dict(LLAMA, qkv_bias=True, mlp_bias=True),
    **{f"rope, {kind}": scaled(kind) for kind in SCALINGS},
    "windows with a base of their own": dict(
        scaled("yarn"), window_rope_base=500.0, window_rope_scaled=False, **patterned("window", "full")
    ),
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
    ModelConfig(**network)
    return network


def _drawn(draw):
    def some(value, part=0.3):
        return value if draw.random() < part else None

    heads, positions = draw.choice([2, 4, 6]), draw.choice(POSITIONS)
    rope, norm = positions == "rope", draw.choice(["layernorm", "rmsnorm"])
    width = draw.choice([8, 16])
    kinds = LAYER_KINDS if rope else ("full", "window")
    network = dict(
        SHAPE,
        layers=draw.randint(1, 4),
        heads=heads,
        hidden=heads * draw.choice([8, 12]),
        head_dim=width,
        kv_heads=draw.choice([None, 1, heads // 2]),
        ffn=draw.choice([None, 40]),
        positions=positions,
        norm=norm,
        norm_order=draw.choice(["pre", "post", "sandwich"]),
        norm_eps=draw.choice([1e-6, 1e-3]),
        activation=draw.choice(["gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu", "geglu", "geglu_tanh"]),
        bias=draw.random() < 0.5,
        qkv_bias=some(draw.random() < 0.5),
        out_bias=some(draw.random() < 0.5),
        mlp_bias=some(draw.random() < 0.5),
        tied=draw.random() < 0.5,
        embed_norm=draw.random() < 0.2,
        embed_scale=draw.random() < 0.2,
        qk_norm=draw.random() < 0.4,
        score_scale=some(draw.uniform(0.1, 0.6)),
        score_cap=some(draw.uniform(1, 5)),
        attention_sinks=draw.random() < 0.2,
        embed_multiplier=some(3.0) or 1.0,
        residual_multiplier=some(0.5) or 1.0,
        logit_multiplier=some(0.25) or 1.0,
        logit_cap=some(draw.uniform(1, 5)),
        **patterned(*draw.choices(kinds, k=draw.randint(1, 4))),
    )
    if network["qk_norm"] and norm == "rmsnorm":
        network["qk_norm_span"] = draw.choice(["head", "projection"])
    if rope:
        network |= dict(rope_base=draw.choice([500.0, 10000.0]), rope_fraction=draw.choice([1.0, 0.5]))
        kind = draw.choice([None, *SCALINGS])
        if kind is not None:
            network["rope_scaling"] = dict(rope_type=kind, **SCALINGS[kind])
        if kind == "longrope":
            count = int(width * network["rope_fraction"]) // 2
            for name, slope in (("short_factor", 0.1), ("long_factor", 1.0)):
                network["rope_scaling"][name] = str([1 + slope * i for i in range(count)])
        if "window" in network and draw.random() < 0.5:
            network |= dict(window_rope_base=some(700.0), window_rope_scaled=draw.random() < 0.5)
    return network


GPT = dict(SHAPE, bias=True)
GATES = ["swiglu", "geglu", "geglu_tanh"]
ALIKE = {
    "gpt2": lambda draw: dict(
        GPT, tied=draw.random() < 0.5, activation=draw.choice(["gelu", "gelu_tanh", "relu", "relu2"])
    ),
    "bloom": lambda draw: dict(GPT, positions="alibi", embed_norm=True),
    "neox": lambda draw: dict(GPT, positions="rope", tied=draw.random() < 0.5, rope_fraction=draw.choice([0.5, 1.0])),
    "llama": lambda draw: dict(LLAMA, activation=draw.choice(GATES), bias=draw.random() < 0.5),
    "mistral": lambda draw: dict(LLAMA, **patterned("window")),
    "qwen2": lambda draw: dict(LLAMA, qkv_bias=True, **patterned(*draw.choices(["full", "window"], k=3))),
    "qwen3": lambda draw: dict(LLAMA, qk_norm=True, **patterned(*draw.choices(["full", "window"], k=3))),
    "smollm3": lambda draw: dict(LLAMA, **patterned(*draw.choices(["full", "nope"], k=3))),
    "smollm3, windows": lambda draw: dict(LLAMA, **patterned(*draw.choices(["full", "window_nope"], k=4))),
    "granite": lambda draw: dict(
        LLAMA,
        embed_multiplier=draw.choice([1.0, 6.0]),
        residual_multiplier=draw.choice([1.0, 0.3]),
        logit_multiplier=draw.choice([0.5, 0.125]),
        score_scale=draw.choice([None, 0.1]),
    ),
    "arcee": lambda draw: dict(LLAMA, activation="relu2"),
    "apertus": lambda draw: dict(LLAMA, activation="xielu", qk_norm=True),
    "phi3": lambda draw: dict(LLAMA, rope_fraction=0.5),
    "olmo": lambda draw: dict(
        LLAMA,
        norm_order="post",
        qk_norm=True,
        qk_norm_span="projection",
        **patterned(*draw.choices(["full", "window"], k=4), window_rope_base=draw.choice([None, 700.0])),
    ),
    "gemma": lambda draw: dict(
        LLAMA,
        norm_order="sandwich",
        activation="geglu_tanh",
        embed_scale=True,
        qk_norm=draw.random() < 0.5,
        score_scale=draw.choice([None, 12**-0.5, 0.3]),
        score_cap=draw.choice([None, 3.0]),
        logit_cap=draw.choice([None, 3.0]),
        **patterned(*draw.choices(["full", "window"], k=3)),
    ),
    "glm4": lambda draw: dict(LLAMA, norm_order="sandwich", qkv_bias=draw.random() < 0.5, rope_fraction=0.5),
    "nanochat": lambda draw: dict(LLAMA, activation="relu2", embed_norm=True, qk_norm=True, logit_cap=3.0),
    "own": lambda draw: dict(SHAPE, positions=draw.choice(POSITIONS), embed_scale=True, activation=draw.choice(GATES)),
}


def exportable(seed):
    """A network like those of one of transformers' classes."""
    draw = random.Random(seed)
    while True:
        name = draw.choice([*ALIKE])
        network = ALIKE[name](draw)
        network |= dict(layers=draw.randint(1, 4), norm_eps=draw.choice([1e-6, 1e-4]))
        if "kv_heads" in network:
            network |= dict(kv_heads=draw.choice([None, 1, 2, 4]), tied=draw.random() < 0.4)
            network |= dict(head_dim=draw.choice([None, 16])) if name not in ("phi3", "olmo", "nanochat") else {}
        kind = draw.choice([None, None, *SCALINGS])
        if network.get("positions") == "rope" and kind and name != "own":
            parameters = dict(SCALINGS[kind])
            if kind == "longrope":
                count = int((network.get("head_dim") or 8) * network.get("rope_fraction", 1.0)) // 2
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
            network |= dict(rope_scaling=dict(rope_type=kind, **parameters))
            if "window" in network and draw.random() < 0.5:
                network["window_rope_scaled"] = False
        network = {key: value for key, value in network.items() if key != "window_rope_base" or network.get("window")}
        try:
            return valid(network)
        except ConfigError:
            continue


def sizes(config):
    """Values of all weights together, by the shapes that the model declares."""
    from hpclm.interop.rules import placements

    return sum(math.prod(placement.shape) for placement in placements(config).values())
