"""The base class of all settings sections, and common checks."""

import math
from collections.abc import Iterator
from typing import Any

from hpclm.errors import ConfigError

MAX_INTEGER = 2**63 - 1  # integers beyond 64 bits are refused
MAX_SHOWN_CHARACTERS = 200  # characters of a value in a message


class Checked:
    """A settings class whose constructor raises ConfigError for invalid values."""

    def __post_init__(self) -> None:
        problems_here = list(self.problems())
        if problems_here:
            raise ConfigError(problems_here)

    def __dir__(self) -> list[str]:
        """What completion shows: the settings."""
        return list(getattr(self, "__dataclass_fields__", ()))

    def problems(self) -> Iterator[str]:
        """Everything that is wrong, one sentence each, with what to do."""
        yield from ()

    def _changed(self, name: str) -> bool:
        """Whether a setting with a plain default differs from it."""
        return bool(getattr(self, name) != getattr(type(self), name))


def at_least(low: float, section: str, **values: float | None) -> Iterator[str]:
    """A problem for every value that is below ``low`` or not finite; ``section`` is empty for settings of the top level."""
    for name, value in values.items():
        if value is not None and not (value >= low and math.isfinite(value)):
            dotted = f"{section}.{name}".lstrip(".")
            yield f"{dotted}={value} must be at least {low:g}" + (not math.isfinite(value)) * " and finite"


def at_most(high: int, section: str, **values: int | None) -> Iterator[str]:
    """A problem for every value that is above ``high``."""
    for name, value in values.items():
        if value is not None and value > high:
            yield f"{section}.{name}={value} must be at most {high}"


def fraction(section: str, **values: float) -> Iterator[str]:
    """A problem for every value outside [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            yield f"{section}.{name}={value} must be at least 0 and less than 1"


def keyed_texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All text in nested mappings and lists, with its dotted key; in a list, that of the list."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from keyed_texts(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from keyed_texts(inner, key)


def texts(value: Any) -> Iterator[str]:
    """All text in a value, names in its mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from texts(inner)


def is_utf8(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8; half a character (a lone surrogate) cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def typed(value: Any) -> str:
    """A value as it is typed, on one line, for a message."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return (
            value
            if value.strip() == value != "" and value.isprintable() and len(value) <= MAX_SHOWN_CHARACTERS
            else shown(value)
        )
    if isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(typed, value))}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{name}: {typed(inner)}' for name, inner in value.items())}}}"
    else:
        text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"


def shown(value: Any) -> str:
    """A value for a message, shortened, on one line."""
    try:
        text = repr(value)
    except Exception:  # of an object that is half made, nested too deeply, or a number of thousands of digits
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
