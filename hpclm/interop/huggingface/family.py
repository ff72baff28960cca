"""What a kind of model of transformers is: which of our networks it can be, its config.json, and its weights."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpclm.config import ModelConfig
from hpclm.errors import ConfigError
from hpclm.interop.rules import Rule

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One class of transformers."""

    architecture: str
    needs: Mapping[str, tuple[Any, ...]]
    """Our settings, and the values of each that it has."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Keys of config.json, and the values with which it is a network of ours; the first is what its absence means."""
    described: Callable[[ModelConfig], dict[str, Any]]
    """config.json of a network."""
    settings: Callable[[Json], dict[str, Any]]
    """Settings of the network that a config.json describes."""
    rules: Callable[[ModelConfig], Iterable[Rule]]
    """Every weight."""
    prefix: str
    """Before the names of all tensors but the output projection's; files of the bare model leave it out."""
    more: Callable[[ModelConfig], Iterable[str]] = lambda config: ()
    """What else stands in the way of a network, in sentences without a subject."""
    grouped: bool = False
    """Whether key/value heads may be fewer than heads."""
    buffers: tuple[str, ...] = ()
    """Ends of names that old files have and that are no weights."""
    wrong: Callable[[Json], Iterable[str]] = lambda tree: ()
    """What else in a config.json is no network of ours."""

    def obstacles(self, config: ModelConfig) -> list[str]:
        """Why a network of these settings is none of this family."""
        found = [
            f"model.{name}={_shown(getattr(config, name))}, where it has {' or '.join(map(_shown, values))}"
            for name, values in self.needs.items()
            if getattr(config, name) not in values
        ]
        if not self.grouped and config.groups != config.heads:
            found.append(f"model.kv_heads={config.kv_heads}, where it has as many as model.heads={config.heads}")
        return [*found, *self.more(config)]

    def problems(self, tree: Json) -> list[str]:
        """What in a config.json is no network of ours."""
        found = [
            f"{key}={_shown(tree.get(key, values[0]))}, and hpclm has {' or '.join(map(_shown, values))}"
            for key, values in self.fixed.items()
            if tree.get(key, values[0]) not in values
        ]
        return [*found, *self.wrong(tree)]


def activation(tree: Json, key: str, default: str, names: Mapping[str, str]) -> str:
    """Our name of the activation that a config.json gives under ``key``."""
    theirs = tree.get(key, default)
    if theirs not in names:
        raise ConfigError(f"{key}={_shown(theirs)}, and hpclm has {', '.join(names)}")
    return names[theirs]


def needed(tree: Json, *keys: str) -> Iterator[Any]:
    """The values of keys that a config.json must have."""
    missing = [key for key in keys if tree.get(key) is None]
    if missing:
        raise ConfigError(f"it does not say {', '.join(missing)}")
    for key in keys:
        yield tree[key]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
