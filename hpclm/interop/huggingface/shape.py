"""Translates rotary positions, kinds of layers, biases and dropout between transformers' config.json and our settings."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.rope import KINDS, parsed

log = logging.getLogger(__name__)
Json = Mapping[str, Any]
KEPT = {"full_attention": "full", "sliding_attention": "window"}
OUTSIDE = ("rope_theta", "partial_rotary_factor", "rope_type", "type")
"""Keys of rope_parameters that do not belong to a scaling."""
BETAS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
BIASES = ("attention.qkv_bias", "attention.out_bias", "mlp_bias")


@dataclass(frozen=True)
class Part:
    """Settings that classes describe alike, in both directions."""

    read: Callable[[Json], dict[str, Any]]
    """Our settings from a completed config.json; ConfigError for features that hpclm lacks."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The keys that ``read`` reads, and those that other programs read."""


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


def rope(tree: Json) -> dict[str, Any]:
    """Our settings for rotary positions that are the same in all layers."""
    given = mapping(tree["rope_parameters"], "rope_parameters")
    kinds = [key for key in given if key in KEPT]
    if kinds:
        raise ConfigError(
            f"rope_parameters of {', '.join(kinds)}: this class has the same rotary positions in all layers"
        )
    return rotary(tree, given)


def rotary(tree: Json, given: Json) -> dict[str, Any]:
    """Our settings for the completed rope_parameters ``given``."""
    kind = given.get("rope_type", "default")
    return {
        "rope.base": number(given, "rope_theta"),
        "rope.fraction": number({"partial_rotary_factor": 1.0, **given}, "partial_rotary_factor"),
        "rope.scaling": {} if kind == "default" else _scaling(tree, kind, given),
    }


def _scaling(tree: Json, kind: Any, given: Json) -> dict[str, str]:
    """model.rope.scaling for parameters in config.json; ConfigError for parameters that transformers ignores."""
    original = "original_max_position_embeddings"
    scaling = {key: value for key, value in given.items() if key not in OUTSIDE}
    if kind == "dynamic":  # transformers uses max_position_embeddings
        scaling[original] = tree["max_position_embeddings"]
    if kind in ("yarn", "longrope"):
        if "factor" in scaling and scaling["factor"] is None:
            scaling["factor"] = number(tree, "max_position_embeddings") / number(scaling, original)
        absent = {key for key in ("attention_factor", *BETAS) if key in scaling and scaling[key] is None}
        absent |= {key for key in BETAS if scaling.get(key) == 0}  # transformers treats 0 as missing
        scaling = {key: value for key, value in scaling.items() if key not in absent}
    if "truncate" in scaling:
        scaling["truncate"] = bool(scaling["truncate"])
    read_keys = " ".join(KINDS.get(str(kind), ())).split()
    unknown = [key for key in scaling if read_keys and key not in read_keys]
    if unknown:
        raise ConfigError(
            f"rope_parameters: transformers ignores {', '.join(unknown)} with rope_type={kind}; remove this from a copy of config.json"
        )
    return {"rope_type": as_json(kind), **{key: as_json(value) for key, value in scaling.items()}}


def described_rope(config: ModelConfig) -> dict[str, Any]:
    """Keys of config.json for rotary positions, as all versions of transformers and other programs read them."""
    keys: dict[str, Any] = {"rope_theta": config.rope.base, "rope_scaling": scaling(config) or None}
    if config.rope.fraction != 1.0:
        keys["partial_rotary_factor"] = config.rope.fraction
    return keys


def scaling(config: ModelConfig) -> dict[str, Any]:
    """rope_scaling with numeric values."""
    return parsed(config.rope.scaling)


def layers(tree: Json, turned: bool = False, uniform: bool = False) -> dict[str, Any]:
    """Our settings for kinds of layers. ``turned``: layers with a window have their own rotary positions, even if the window covers the
    context. ``uniform``: the class has no layer_types."""
    window = tree["sliding_window"]
    context = tree["max_position_embeddings"]
    if uniform:
        types = ["full_attention" if window is None else "sliding_attention"] * tree["num_hidden_layers"]
    else:
        types = tree["layer_types"]
    if not {*types} <= KEPT.keys():
        raise ConfigError(f"layer_types={types}: hpclm has {' and '.join(KEPT)}")
    kinds = [KEPT[layer_type] for layer_type in types]
    if "window" in kinds and window is None:
        raise ConfigError(f"layer_types={types} with sliding_window={window}")
    dynamic = "dynamic" in str(tree.get("rope_parameters"))  # such a model reads longer texts
    covers = window is not None and window >= context and not dynamic  # then it has no effect
    if window is None or "window" not in kinds or (covers and not turned):
        return {"attention.pattern": ["full"], "attention.window": None}
    return {"attention.pattern": period(kinds), "attention.window": window}


def period(kinds: Sequence[str]) -> list[str]:
    """The shortest pattern that repeats to ``kinds``."""
    sizes = range(1, len(kinds) + 1)
    size = next(n for n in sizes if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return list(kinds[:size])


def described_parameters(config: ModelConfig) -> dict[str, Any]:
    """rope_parameters, for a class that scales positions if config.json does not say that they are not scaled."""
    return {"rope_parameters": {"rope_type": "default", **scaling(config), "rope_theta": config.rope.base}}


def layer_types(config: ModelConfig, unused: int | None = None) -> dict[str, Any]:
    """Keys of config.json for kinds of layers. ``unused``: the window if no layer has one."""
    types = ["full_attention" if layer.window is None else "sliding_attention" for layer in config.blocks]
    return {"layer_types": types, "sliding_window": config.attention.window or unused}


def with_positions(tree: Json, pattern: Sequence[str], key: str) -> dict[str, Any]:
    """The pattern of layers, of which those without positions have 0 in the list ``key`` of config.json."""
    turned = tree[key]
    count = tree["num_hidden_layers"]
    if len(turned) != count:
        raise ConfigError(f"{key}={turned} must be a list with a number for each of {count} layers")
    names = {"full": "nope", "window": "window_nope"}
    kinds = [pattern[i % len(pattern)] for i in range(count)]
    return {"attention.pattern": period([kind if turned[i] else names[kind] for i, kind in enumerate(kinds)])}


def described_by_kind(config: ModelConfig) -> dict[str, Any]:
    """rope_parameters of a class with rotary positions for each kind of layers."""
    full = {"rope_type": "default", "rope_theta": config.rope.base, **scaling(config)}
    near = {"rope_type": "default", "rope_theta": config.rope.window_base or config.rope.base}
    if config.rope.window_scaled:
        near |= scaling(config)
    return {"rope_parameters": {"full_attention": full, "sliding_attention": near}}


def canonical(config: ModelConfig) -> ModelConfig:
    """``config`` as most classes describe the same network: with the shortest pattern, and without an unused window."""
    patterns = {name: period(kinds) for name, kinds in config.patterns(range(config.layers)).items()}
    if all(layer.window is None for layer in config.blocks):
        unused = {"attention.window": None, "rope.window_base": None, "rope.window_scaled": True}
        config = config.replaced({"attention.pattern": ["full"], **unused})
    return config.replaced(patterns)


def one_dropout(tree: Json) -> dict[str, Any]:
    """No setting, but a warning if two dropouts differ."""
    embedded, added = (tree[name] for name in ("embd_pdrop", "resid_pdrop"))
    if embedded != added:
        log.warning(
            "embd_pdrop=%s and resid_pdrop=%s: hpclm has one model.dropout for both and uses resid_pdrop; give model.dropout=... for "
            "another value",
            embedded,
            added,
        )
    return {}


def biases(*keys: str | bool) -> Part:
    """Biases. ``keys``: the keys for those of qkv, the output projection and the MLP, or their fixed values."""

    def read(tree: Json) -> dict[str, Any]:
        values = [key if isinstance(key, bool) else bool(tree[key]) for key in keys]
        if len(set(values)) == 1:
            return dict(bias=values[0])
        return dict(bias=False) | {name: value for name, value in zip(BIASES, values, strict=True) if value}

    def write(config: ModelConfig) -> dict[str, Any]:
        return {key: value for key, value in zip(keys, config.biases, strict=True) if isinstance(key, str)}

    return Part(read, write)


def kinds_of_positions(tree: Json) -> dict[str, Any]:
    """Our settings for a class whose layers with a window have other rotary positions; ConfigError if these have another scaling."""
    both = mapping(tree["rope_parameters"], "rope_parameters")
    full, window = (mapping(both.get(kind), f"rope_parameters.{kind}") for kind in KEPT)
    if any("truncate" in parameters for parameters in (both, full, window)):
        raise ConfigError("rope_parameters: truncate is not supported in a class with several kinds of layers")
    kinds = layers(tree, turned=True)
    far = rotary(tree, full)
    near = rotary(tree, window)
    if kinds["attention.window"] is None:  # then no layer uses them
        return far | kinds
    if near["rope.fraction"] != far["rope.fraction"] or near["rope.scaling"] not in ({}, far["rope.scaling"]):
        raise ConfigError("rope_parameters: layers with a window are scaled differently from the others")
    base = other_base(near["rope.base"], far["rope.base"])
    scaled = near["rope.scaling"] == far["rope.scaling"]
    return far | kinds | {"rope.window_base": base, "rope.window_scaled": scaled}


def other_base(window: float, base: float) -> float | None:
    """model.rope.window_base for the base of layers with a window; None if it equals the ``base`` of the other layers."""
    return None if window == base else window


ROPE = Part(rope, described_rope)
STATED_ROPE = Part(rope, described_parameters)
ROPE_BY_KIND = Part(
    kinds_of_positions, lambda config: described_rope(config) | layer_types(config) | described_by_kind(config)
)
"""Kinds of layers, each with its rotary positions, which transformers 4 reads as those of all layers."""
WINDOWS = Part(layers, layer_types)
STATED_WINDOWS = Part(layers, lambda config: layer_types(config, config.context))
"""Kinds of layers in a class that needs a window even if no layer has it."""
SWITCHED_WINDOWS = Part(
    layers,
    lambda config: layer_types(config) | dict(use_sliding_window=bool(config.attention.window), max_window_layers=0),
)
UNIFORM_WINDOWS = Part(partial(layers, uniform=True), lambda config: {"sliding_window": config.attention.window})
ALL_BIASES = biases("attention_bias", "attention_bias", "mlp_bias")
ATTENTION_BIASES = biases("attention_bias", "attention_bias", False)
NO_BIASES = biases(False, False, False)
ONE_DROPOUT = Part(one_dropout, lambda config: {"embd_pdrop": config.dropout})
