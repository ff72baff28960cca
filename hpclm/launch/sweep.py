"""One run for each value of a setting, or for each combination of values of several settings."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpclm.config.compose import is_override
from hpclm.errors import ConfigError


@dataclass(frozen=True)
class Variant:
    """One run of a sweep."""

    overrides: tuple[str, ...] = ()
    suffix: str = ""
    """Added to the run's name and directory: -lr-0.001-seed-2."""


def variants(words: Sequence[str]) -> list[Variant]:
    """The runs for ``words``, each key=a,b,c; one without words. ConfigError if two would have the same name."""
    axes = [[(key, value) for value in values] for key, values in map(_axis, words)]
    found = [_variant(chosen) for chosen in itertools.product(*axes)]
    names = [(each.suffix, *(o for o in each.overrides if o.startswith(("out=", "name=")))) for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(
            f"--sweep {' '.join(words)}: two runs would be called {''.join(twice).lstrip('-')}; change a value"
        )
    return found


def _axis(word: str) -> tuple[str, list[str]]:
    key, _, text = word.partition("=")
    values = list(_split(text))
    if not is_override(word) or not all(values):
        raise ConfigError(f"--sweep {word!r} is not key=a,b,c, such as optim.lr=1e-4,3e-4")
    return key.strip(), values


def _split(text: str) -> Iterator[str]:
    """``text`` split at commas, except inside brackets."""
    depth, part = 0, ""
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth <= 0:
            yield part.strip()
            part = ""
        else:
            part += character
    yield part.strip()


def _variant(chosen: Sequence[tuple[str, str]]) -> Variant:
    named = [(key.rpartition(".")[2], value) for key, value in chosen if key not in ("out", "name")]
    suffix = "".join(f"-{key}-{re.sub(r'[^A-Za-z0-9._+-]+', '_', value)}" for key, value in named)
    return Variant(tuple(f"{key}={value}" for key, value in chosen), suffix)
