"""A model class of transformers: the networks that it covers, its config.json, and the names of its weights."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.experts import COEFFICIENTS
from hpclm.config.section import leaves
from hpclm.interop.huggingface.completion import Keys, completed
from hpclm.interop.huggingface.shape import BIASES, Json, Part, as_json, canonical, scaling
from hpclm.interop.rules import ConversionRule

GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}
GELUS |= dict(gelu_fast="gelu_tanh", gelu_accurate="gelu_tanh", gelu_python_tanh="gelu_tanh", gelu_python="gelu")
"""Maps transformers' names of activations to ours."""
LAYERNORM = dict(norm="layernorm", bias=True)
"""Settings of older classes."""
UNWRITTEN = f"""
    vocab_size vocab_multiple context dropout attention.dropout init_std kernels attention.kernel freeze {" ".join(COEFFICIENTS)}"""
"""Settings that the weights and logits of a class do not depend on, or that all classes describe."""
NEEDED = ("experts.count", "attention.latent.kv_rank")
"""Settings that may be 0 in hpclm, but not in a class that has them."""
PRECISION = 1e-6
"""Relative difference of two numbers that count as equal: a class may store the inverse or the square."""


@dataclass(frozen=True)
class Family:
    """One class of transformers."""

    architecture: str
    model_type: str
    keys: Mapping[str, str]
    """Our setting -> its key in config.json."""
    rules: Callable[[ModelConfig], Iterable[ConversionRule]]
    """The conversion rule of each weight."""
    prefix: str
    """Prefix of all tensor names except the output projection; missing in files of the bare model."""
    constants: Mapping[str, Any]
    """Our settings that have one value in all networks of the class."""
    parts: Sequence[Part] = ()
    """Further settings that it shares with other classes."""
    read: Callable[[Json], dict[str, Any]] = lambda tree: {}
    """Settings of this class alone from a completed config.json; ConfigError for features that hpclm lacks."""
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    """The keys that ``read`` reads, and those that other programs read."""
    activations: Mapping[str, str] = field(default_factory=lambda: GELUS)
    """Maps names of activations in config.json to ours."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that the class in transformers does not have, and the values that published files may give them."""
    unread: str = ""
    """Keys that the class in transformers does not have, and that do not change the network."""
    buffers: tuple[str, ...] = ()
    """Suffixes of tensor names in old files that are not weights."""
    left_out: Callable[[Json, str], bool] = lambda tree, name: False
    """Whether a tensor belongs to layers for multi-token prediction, which imports omit, as transformers does."""
    newer: Callable[[ModelConfig], bool] = lambda config: False
    """Whether transformers 4 would compute something else from the config.json of a network."""
    form: Callable[["Family", Json], "Family"] = lambda family, tree: family
    """The class as a completed config.json describes it, if its rules depend on a key."""

    @property
    def theirs(self) -> dict[str, str]:
        """Maps our settings to keys in config.json, including the keys that all classes share."""
        return {"vocab_size": "vocab_size", "init_std": "initializer_range", "tied": "tie_word_embeddings", **self.keys}

    @property
    def _all_parts(self) -> list[Part]:
        return [*self.parts, Part(self.read, self.write)]

    def completed(self, tree: Json) -> Keys:
        """``tree`` as transformers' class completes it."""
        return completed(tree, self.model_type)

    def described(self, config: ModelConfig) -> dict[str, Any]:
        """The config.json of a network. A setting that the class lacks is left out."""
        names = {ours: theirs for theirs, ours in reversed([*self.activations.items()])}
        values = effective(config)
        values["activation"] = names.get(config.activation, next(iter(self.activations)))
        if not config.experts.count:
            values = {ours: value for ours, value in values.items() if not ours.startswith("experts.")}
        keys = {theirs: values[ours] for ours, theirs in self.theirs.items() if ours in values}
        tree = {"model_type": self.model_type, **keys}
        for part in self._all_parts:
            tree |= part.write(config)
        if config.rope.scaling.get("rope_type") == "dynamic":  # transformers scales beyond max_position_embeddings
            tree["max_position_embeddings"] = json.loads(config.rope.scaling["original_max_position_embeddings"])
        return tree

    def settings(self, tree: Keys) -> dict[str, Any]:
        """The settings that a completed config.json describes; ConfigError if hpclm does not support the network."""
        values: dict[str, Any] = {ours: tree.get(key) for ours, key in self.theirs.items()}
        for ours in NEEDED:
            if values.get(ours) == 0:
                raise ConfigError(f"{self.theirs[ours]}=0 must be at least 1")
        if "activation" in values:
            theirs = values["activation"]
            if not isinstance(theirs, str) or theirs not in self.activations:
                raise ConfigError(
                    f"{self.keys['activation']}={as_json(theirs)}, but hpclm supports {', '.join(self.activations)}"
                )
            values["activation"] = self.activations[theirs]
        if "ffn" in values and values["ffn"] is None:
            values["ffn"] = 4 * values["hidden"]
        if values.get("attention.dropout", 0.0) is None:
            values["attention.dropout"] = 0.0
        for part in self._all_parts:
            values |= part.read(tree)
        wrong = [
            f"model.{name}={as_json(values[name])}, which {self.architecture} in transformers does not have"
            for name, value in self.constants.items()
            if values.get(name, value) != value
        ]
        wrong += [
            f"{key}={as_json(tree.get(key))}, but hpclm supports {' or '.join(map(as_json, supported))}"
            for key, supported in self.fixed.items()
            if tree.get(key, supported[0]) not in supported
        ]
        tree.used.update(self.unread.split())
        wrong += tree.unread()
        if wrong:
            raise ConfigError(wrong)
        settings = {**self.constants, **values}
        if settings.get("experts.count") == 0:
            settings = {ours: value for ours, value in settings.items() if not ours.startswith("experts.")}
        return settings

    def differences(self, config: ModelConfig) -> list[str]:
        """The settings that differ when the config.json of a network is read back; empty if the class covers it. ConfigError if its
        config.json cannot be read."""
        return list(differences(config, ModelConfig.of(self.settings(self.completed(self.described(config))))))

    def covers(self, config: ModelConfig) -> bool:
        """Whether a network is one of this class."""
        try:
            return not self.differences(config)
        except ConfigError:
            return False


def effective(config: ModelConfig) -> dict[str, Any]:
    """All settings of a network, each with the value that its default stands for."""
    qkv, out, mlp = config.biases
    return dict(leaves(config)) | {
        "ffn": config.ffn_width,
        "attention.kv_heads": config.attention.groups,
        "attention.head_dim": config.head_dim,
        "attention.latent.value_dim": config.value_width,
        "attention.score_scale": config.attention.score_scale or config.head_width**-0.5,
        "attention.qkv_bias": qkv,
        "attention.out_bias": out,
        "mlp_bias": mlp,
        "experts.ffn": config.expert_width,
    }


def differences(config: ModelConfig, back: ModelConfig) -> Iterator[str]:
    """The settings in which two networks differ, with the values of both."""
    unused = {*UNWRITTEN.split(), *_unused(config)}
    ours = _compared(config)
    theirs = _compared(back)
    for name, value in ours.items():
        if name not in unused and not _same(value, theirs[name]):
            yield f"model.{name}={as_json(value)}, but it needs {as_json(theirs[name])}"


def _compared(config: ModelConfig) -> dict[str, Any]:
    values = effective(canonical(config))
    values["rope.scaling"] = scaling(config)
    values["rope.window_base"] = config.rope.window_base or config.rope.base
    if config.norm == "layernorm":  # whose biases only model.bias sets
        values |= {name: None for name in BIASES if values[name] == config.bias}
    return values


def _unused(config: ModelConfig) -> Iterator[str]:
    """Settings without effect in a network."""
    names = dict(leaves(config))
    if config.norm == "rmsnorm":
        yield "bias"
    if config.dense_layers == 0:
        yield "ffn"
    if not config.attention.qk_norm:
        yield "attention.qk_norm_span"
    if not config.experts.count:
        yield from (name for name in names if name.startswith("experts.") and name != "experts.count")
    if config.attention.latent.kv_rank:
        yield "attention.kv_heads"
    else:
        yield from (
            name for name in names if name.startswith("attention.latent.") and name != "attention.latent.kv_rank"
        )
    if not config.rotates:
        yield from (name for name in names if name.startswith("rope."))
    if not config.rotates_in_windows:
        yield "rope.window_base"
    if not config.rotates_in_windows or not config.rope.scaling:
        yield "rope.window_scaled"


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(_same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=PRECISION)
    return bool(ours == theirs)
