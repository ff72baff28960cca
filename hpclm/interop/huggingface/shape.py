"""Translates rotary positions, kinds of layers and biases between transformers' config.json and our settings."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.model import MAX_LAYERS
from hpclm.config.rope import KINDS, parsed

Json = Mapping[str, Any]
KEPT = {"full_attention": "full", "sliding_attention": "window"}
OUTSIDE = ("rope_theta", "partial_rotary_factor", "rope_type", "type")
"""Keys of rope_parameters that do not belong to a scaling."""
BETAS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
ROPE = "rope_theta rope_parameters rope_scaling partial_rotary_factor original_max_position_embeddings"
"""Keys of config.json that rope() reads."""
LAYERS = "layer_types sliding_window use_sliding_window"
"""Keys of config.json that layers() reads."""
ROPE_SETTINGS = ("rope.base", "rope.fraction", "rope.scaling")
WINDOW_SETTINGS = ("attention.pattern", "attention.window", "rope.window_base", "rope.window_scaled")
BIASES = ("attention.qkv_bias", "attention.out_bias", "mlp_bias")


def mapping(value: Any, key: str) -> Json:
    """A mapping in config.json; empty if missing. ConfigError for any other value."""
    if not isinstance(value or {}, Mapping):
        raise ConfigError(f"{key}={as_json(value)} must be a mapping")
    return value or {}


def as_json(value: Any) -> str:
    """A value as JSON; a text without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def number(tree: Json, key: str) -> float:
    """A positive number in config.json; ConfigError for any other value."""
    value = tree[key]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(f"{key}={json.dumps(value)} must be a finite number of more than 0")
    return float(value)


def with_default_scaling(tree: Json, parameters: Json) -> Json:
    """``tree``, with rope_parameters ``parameters`` if it does not scale positions."""
    if tree.get("rope_parameters") or tree.get("rope_scaling"):
        return tree
    return {**tree, "rope_parameters": parameters}


def rope(tree: Json, theta: float = 10000.0, part: float = 1.0, parameters: Json | None = None) -> dict[str, Any]:
    """Our settings for rotary positions. ``theta`` and ``part``: defaults for missing keys.

    ``parameters``: those of one kind of layers. None: rope_parameters as transformers 5 writes them, or rope_scaling, which takes
    precedence (``RotaryEmbeddingConfigMixin.convert_rope_params_to_dict``).
    """
    nested = parameters is not None
    both = mapping(tree.get("rope_parameters"), "rope_parameters")
    given = parameters or ({} if nested else mapping(tree.get("rope_scaling"), "rope_scaling") or both)
    kinds = [key for key in given if key in KEPT]
    if kinds:
        raise ConfigError(
            f"rope_parameters of {', '.join(kinds)}: this class has the same rotary positions in all layers"
        )
    kind = given.get("rope_type", given.get("type", "default"))
    scaling = {key: value for key, value in given.items() if key not in OUTSIDE}
    if kind == "yarn" and nested:  # transformers reads truncate outside the parameters of a kind of layers
        scaling.pop("truncate", None)
        if "truncate" in both:
            scaling["truncate"] = both["truncate"]
    base = given if "rope_theta" in given else {"rope_theta": theta, **tree}
    return {
        "rope.base": number(base, "rope_theta"),
        "rope.fraction": _first(given.get("partial_rotary_factor"), tree.get("partial_rotary_factor"), part),
        "rope.scaling": {} if kind == "default" else _scaling(tree, kind, scaling, nested),
    }


def _scaling(tree: Json, kind: Any, given: Json, nested: bool) -> dict[str, str]:
    """model.rope.scaling for parameters in config.json; ConfigError for parameters that transformers ignores."""
    context = tree.get("max_position_embeddings")
    original = "original_max_position_embeddings"
    scaling = dict(given)
    if kind in ("yarn", "llama3", "longrope"):
        scaling.setdefault(original, context)
        if original in tree and not nested:
            scaling[original] = tree[original]
    if kind == "dynamic":  # transformers uses max_position_embeddings
        scaling[original] = context
    if kind in ("yarn", "longrope"):
        if "factor" in scaling and scaling["factor"] is None:
            scaling["factor"] = number(tree, "max_position_embeddings") / number(scaling, original)
        absent = {key for key in ("attention_factor", *BETAS) if key in scaling and scaling[key] is None}
        absent |= {key for key in BETAS if scaling.get(key) == 0}  # transformers treats 0 as missing
        scaling = {key: value for key, value in scaling.items() if key not in absent}
    if "truncate" in scaling:
        scaling["truncate"] = bool(scaling["truncate"])
    read_keys = " ".join(KINDS.get(str(kind), ())).split()
    unknown = [f"{_place(tree, key)}{key}" for key in scaling if read_keys and key not in read_keys]
    if unknown:
        ignore = " ".join(f"--ignore {key}" for key in unknown)
        raise ConfigError(
            f"{', '.join(unknown)}: transformers ignores this with rope_type={kind}; if hpclm should ignore it too, give {ignore}"
        )
    return {"rope_type": as_json(kind), **{key: as_json(value) for key, value in scaling.items()}}


def _place(tree: Json, key: str) -> str:
    """Path of a scaling parameter in config.json, as a prefix for its name."""
    places = {"rope_scaling.": tree.get("rope_scaling"), "rope_parameters.": tree.get("rope_parameters")}
    both = places["rope_parameters."] or {}
    places |= {f"rope_parameters.{kind}.": both.get(kind) for kind in KEPT}
    return next((place for place, values in places.items() if key in (values or {})), "")


def described_rope(config: ModelConfig) -> dict[str, Any]:
    """Keys of config.json for rotary positions, as all versions of transformers and other programs read them."""
    keys: dict[str, Any] = {"rope_theta": config.rope.base, "rope_scaling": scaling(config) or None}
    if config.rope.fraction != 1.0:
        keys["partial_rotary_factor"] = config.rope.fraction
    return keys


def scaling(config: ModelConfig) -> dict[str, Any]:
    """rope_scaling with numeric values."""
    return parsed(config.rope.scaling)


def layers(
    tree: Json, kind: Callable[[int], str] | None = None, switched: bool = False, turned: bool = False
) -> dict[str, Any]:
    """Our settings for kinds of layers. ``kind``: gives a layer's kind without layer_types; None: all layers have the window, if any.
    ``switched``: use_sliding_window turns windows on. ``turned``: layers with a window have their own rotary positions, even if the
    window covers the context."""
    window = None if switched and not tree["use_sliding_window"] else tree["sliding_window"]
    context = whole(tree, "max_position_embeddings")
    count = whole(tree, "num_hidden_layers")
    if window is not None and type(window) is not int:
        raise ConfigError(f"sliding_window={window} must be a whole number")
    every = "full_attention" if window is None else "sliding_attention"
    types = tree.get("layer_types")
    if not types:
        types = [every] * count
        if kind and (window is not None or turned):
            types = [kind(i) for i in range(count)]
    if (
        not isinstance(types, list)
        or len(types) != count
        or not {str(layer_type) for layer_type in types} <= KEPT.keys()
    ):
        raise ConfigError(f"layer_types={types}: hpclm has {' and '.join(KEPT)}, one for each of {count} layers")
    kinds = [KEPT[layer_type] for layer_type in types]
    if "window" in kinds and window is None:
        raise ConfigError(f"layer_types={types} with sliding_window={window}")
    scaled = {
        **mapping(tree.get("rope_parameters"), "rope_parameters"),
        **mapping(tree.get("rope_scaling"), "rope_scaling"),
    }
    dynamic = "dynamic" in (scaled.get("rope_type"), scaled.get("type"))  # such a model reads longer texts
    covers = window is not None and window >= context and not dynamic  # then it has no effect
    if window is None or "window" not in kinds or (covers and not turned):
        return {"attention.pattern": ["full"], "attention.window": None}
    return {"attention.pattern": period(kinds), "attention.window": window}


def full_every(n: int) -> Callable[[int], str]:
    """Returns a function that gives a layer's kind: full attention in every ``n``-th layer, a window in the others."""
    return lambda i: "sliding_attention" if (i + 1) % n else "full_attention"


def whole(tree: Json, key: str) -> int:
    """A number in config.json that is checked elsewhere; 0 if it is not valid."""
    value = tree.get(key)
    return value if type(value) is int and value < MAX_LAYERS * MAX_LAYERS else 0


def period(kinds: Sequence[str]) -> list[str]:
    """The shortest pattern that repeats to ``kinds``."""
    sizes = range(1, len(kinds) + 1)
    size = next(n for n in sizes if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return list(kinds[:size])


def layer_types(config: ModelConfig) -> list[str]:
    """The value of layer_types in config.json."""
    return ["full_attention" if layer.window is None else "sliding_attention" for layer in config.blocks]


def described_by_kind(config: ModelConfig) -> dict[str, Any]:
    """rope_parameters of a class with rotary positions for each kind of layers; transformers reads truncate at the outer level."""
    full = {"rope_type": "default", "rope_theta": config.rope.base, **scaling(config)}
    near = {"rope_type": "default", "rope_theta": config.rope.window_base or config.rope.base}
    if config.rope.window_scaled:
        near |= scaling(config)
    parameters: dict[str, Any] = {"full_attention": full, "sliding_attention": near}
    if "truncate" in full:
        parameters["truncate"] = full["truncate"]
    return {"rope_parameters": parameters}


def canonical(config: ModelConfig) -> ModelConfig:
    """``config`` as most classes describe the same network: with the shortest pattern, and without an unused window."""
    patterns = {name: period(kinds) for name, kinds in config.patterns(range(config.layers)).items()}
    if all(layer.window is None for layer in config.blocks):
        unused = {"attention.window": None, "rope.window_base": None, "rope.window_scaled": True}
        config = config.replaced({"attention.pattern": ["full"], **unused})
    return config.replaced(patterns)


def described_layers(config: ModelConfig) -> dict[str, Any]:
    """Keys of config.json for kinds of layers."""
    return {
        "layer_types": layer_types(config),
        "sliding_window": config.attention.window,
        "use_sliding_window": bool(config.attention.window),
    }


def biases(tree: Json, keys: Sequence[str | bool]) -> dict[str, Any]:
    """Our settings for biases. ``keys``: keys for the biases of qkv, the output projection and the MLP, or their fixed values."""
    values = [key if isinstance(key, bool) else bool(tree[key]) for key in keys]
    if len(set(values)) == 1:
        return dict(bias=values[0])
    return dict(bias=False) | {name: value for name, value in zip(BIASES, values, strict=True) if value}


def described_biases(config: ModelConfig, keys: Sequence[str | bool]) -> dict[str, Any]:
    """Keys of config.json for biases."""
    return {key: value for key, value in zip(keys, config.biases, strict=True) if isinstance(key, str)}


def bias_obstacles(config: ModelConfig, keys: Sequence[str | bool]) -> Iterator[str]:
    """Reasons why config.json cannot describe the biases of a network."""
    for i, (name, key, value) in enumerate(zip(BIASES, keys, config.biases, strict=True)):
        if isinstance(key, bool) and key != value:
            yield f"model.{name}={str(value).lower()}, but it needs {str(key).lower()}"
        elif key in keys[:i] and value != config.biases[keys.index(key)]:
            yield f"model.{name}={str(value).lower()}, but it needs one value for this and model.{BIASES[keys.index(key)]}"


def _first(*values: Any) -> float:
    return float(next(value for value in values if value is not None))


def by_kind(tree: Json) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters of rotary positions in layers with full attention and in layers with a window, for a class that has both."""
    both, scaled = (mapping(tree.get(key), key) for key in ("rope_parameters", "rope_scaling"))
    if both and scaled and not isinstance(both.get("full_attention"), Mapping):
        raise ConfigError("rope_scaling changes rope_parameters.full_attention, which is missing")
    full, window = (
        dict(mapping(both.get(kind), f"rope_parameters.{kind}")) for kind in ("full_attention", "sliding_attention")
    )
    return {**full, **scaled}, window


def near(tree: Json, given: Json, far: Json, kinds: Json, theta: float) -> dict[str, Any]:
    """Our settings for the rotary positions of layers with a window. ``given``: their parameters; ``far``: settings of the other layers;
    ``kinds``: the result of layers(). ConfigError if the scaling differs in another way."""
    window_rope = rope(tree, theta, parameters={"rope_theta": theta, **given})
    if kinds["attention.window"] is None:  # then no layer uses them
        return {}
    if window_rope["rope.fraction"] != far["rope.fraction"] or window_rope["rope.scaling"] not in (
        {},
        far["rope.scaling"],
    ):
        raise ConfigError("rope_parameters: layers with a window are scaled differently from the others")
    return {
        "rope.window_base": other_base(window_rope["rope.base"], far["rope.base"]),
        "rope.window_scaled": window_rope["rope.scaling"] == far["rope.scaling"],
    }


def other_base(window: float, base: float) -> float | None:
    """model.rope.window_base for the base of layers with a window; None if it equals the ``base`` of the other layers."""
    return None if window == base else window


def only(config: ModelConfig, *kinds: str) -> Iterator[str]:
    """Reasons why a class with these kinds of layers does not cover a network."""
    others = sorted(set(config.attention.pattern) - set(kinds))
    if others:
        yield f"model.attention.pattern has {', '.join(others)}, but it needs {' and '.join(kinds)}"


def unscaled_windows(config: ModelConfig) -> Iterator[str]:
    """The reason why a class does not cover a network with scaled positions in layers with a window."""
    if config.attention.window and config.rope.scaling and config.rope.window_scaled:
        yield "model.rope.window_scaled=true, but it scales only other layers"
