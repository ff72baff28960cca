"""What reading a DeepSpeed JSON turns up, key by key."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpclm.config import deepspeed_keys


@dataclass
class Found:
    """What a JSON turns out to say."""

    left: dict[str, Any]
    """Keys that nobody has read yet, as dotted paths."""
    settings: dict[str, Any] = field(default_factory=lambda: {"engine.name": "deepspeed"})
    auto: set[str] = field(default_factory=set)
    """Keys that a trainer was to fill in, and hpclm's defaults do."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of DeepSpeed's that no setting stands for."""
    idle: list[str] = field(default_factory=list)
    """What has no effect here, or is left to hpclm's defaults, and why."""
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What contradicts itself, or cannot be had."""

    def take(self, key: str, kind: type, default: Any = None, least: float | None = None, most: float = 2**62) -> Any:
        """The value of ``key``, which is read now; ``default`` where it is missing, null, or wrong, which is noted."""
        value = self.left.pop(key, None)
        if value is None and kind is not dict:  # a section, where it should be one value
            value = {path: self.left.pop(path) for path in list(self.left) if path.startswith(f"{key}.")} or None
        if value is None:
            return default
        fits = deepspeed_keys.fits(value, kind)
        if fits and (kind not in (int, float) or (-most if least is None else least) <= value <= most):
            return int(value) if kind is int else value
        limit = f" of at least {least}" if least is not None else ""
        limit += f" and at most {most}" if most != 2**62 else ""
        self.wrong.append(f"{key}={json.dumps(value)} must be {deepspeed_keys.WORDS[kind]}{limit}")
        return default

    def put(self, settings: Mapping[str, Any]) -> None:
        """Note the settings that are given."""
        self.settings |= {name: value for name, value in settings.items() if value is not None}

    def rest(self, section: str) -> list[str]:
        """The names of a section that are still to be read; they count as read now."""
        keys = [key for key in self.left if key.startswith(f"{section}.")]
        for key in keys:
            del self.left[key]
        return [key.removeprefix(f"{section}.") for key in keys]


def shown(value: Any) -> str:
    """A value as one line of YAML; 1e9 as the whole number it is."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1000:
        value = int(value)
    return str(value) if isinstance(value, str) else json.dumps(value)


def words(found: Found) -> list[str]:
    """The settings as hpclm's commands take them."""
    lines = [f"{name}={shown(value)}" for name, value in found.settings.items()]
    return [*lines, *(f"engine.extra.{key}={shown(value)}" for key, value in found.extra.items())]
