"""What every section of the settings is made of: a class that checks itself, and the sentences of common checks."""

import math
from collections.abc import Iterator

from hpclm.errors import ConfigError


class Checked:
    """A settings class that refuses to exist with values that cannot work."""

    def __post_init__(self) -> None:
        found = list(self.problems())
        if found:
            raise ConfigError(found)

    def problems(self) -> Iterator[str]:
        """Say what cannot work, one sentence each, with the way out."""
        yield from ()


def at_least(low: float, section: str, **values: float | None) -> Iterator[str]:
    """A sentence for every value below ``low`` (or not a finite number)."""
    for name, value in values.items():
        if value is not None and not (value >= low and math.isfinite(value)):
            yield f"{section}.{name}={value} must be at least {low:g}"


def fraction(section: str, **values: float) -> Iterator[str]:
    """A sentence for every value outside [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            yield f"{section}.{name}={value} must be at least 0 and less than 1"
