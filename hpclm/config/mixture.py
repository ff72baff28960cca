"""Datasets as a person lists them: paths alone, each read whole, or every path after its weight, as Megatron takes them."""

import math
from dataclasses import dataclass

from hpclm.errors import ConfigError


@dataclass(frozen=True)
class Mixture:
    """Datasets that are read as one."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    """In any unit; None: each dataset as much as it has."""


def mixture(words: list[str], setting: str) -> Mixture:
    """``words``: paths, or weights and paths in turn; ConfigError names ``setting`` and what is wrong with it."""
    if _number(words[0]) is None:
        stray = [word for word in words if _number(word) is not None]
        if stray:
            raise ConfigError(
                f"{setting}={words}: {stray[0]} is a weight, but the first dataset has none; give all or none"
            )
        return Mixture(tuple(words), None)
    weights, prefixes = [_number(word) for word in words[::2]], words[1::2]
    if len(words) % 2 or None in weights or any(_number(prefix) is not None for prefix in prefixes):
        raise ConfigError(
            f"{setting}={words} must be weights and paths in turn, such as [0.3, a, 0.7, b], or paths alone; "
            "a path that looks like a number is written ./2024"
        )
    found = tuple(weight for weight in weights if weight is not None)
    if not all(weight > 0 and math.isfinite(weight) for weight in found):
        raise ConfigError(f"{setting}={words}: weights must be more than 0; leave out a dataset that is not to be read")
    if len(set(prefixes)) != len(prefixes):
        raise ConfigError(f"{setting}={words} names a dataset twice; add its weights up")
    return Mixture(tuple(prefixes), found)


def named(words: list[str], setting: str) -> dict[str, Mixture]:
    """``words`` of the form name=path; a name that comes again adds a dataset to it."""
    found: dict[str, list[str]] = {}
    for word in words:
        name, sign, prefix = word.partition("=")
        if not (name and sign and prefix) or "/" in name or not name.isprintable():
            raise ConfigError(f"{setting}: {word!r} must be name=path, such as law=/data/law_text_document")
        found.setdefault(name, []).append(prefix)
    return {name: Mixture(tuple(prefixes), None) for name, prefixes in found.items()}


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
