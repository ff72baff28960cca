"""Read values of settings, find the text in them, and show them in messages."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

MAX_INTEGER = 2**63 - 1  # integers beyond 64 bits are refused
MAX_SHOWN_CHARACTERS = 200  # characters of a value in a message


class RefusedSettingError(Exception):
    """A rule reads a refused setting."""


def value_at(section: Any, key: str) -> Any:
    """The value at a dotted key inside ``section``, or ``section`` itself at its own key."""
    name = getattr(section, "key", "")
    return section if key == name else attrgetter(key.removeprefix(f"{name}."))(section)


def as_list(value: Any) -> list[Any]:
    """``value`` if it is a list, else a list with ``value`` alone."""
    return value if isinstance(value, list) else [value]


def assignment(section: Any, key: str) -> str:
    """A setting of ``section`` as key=value."""
    return f"{key}={typed(value_at(section, key))}"


def keyed_texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in nested mappings and lists, with its dotted key; the elements of a list have the key of the list."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from keyed_texts(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from keyed_texts(inner, key)


def texts(value: Any) -> Iterator[str]:
    """Every text in a value, including the names in its mappings."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from texts(inner)


def mapped_texts(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with each text that is not empty passed through ``change``, except for the names in mappings."""
    if isinstance(value, list):
        return [mapped_texts(inner, change) for inner in value]
    if isinstance(value, dict):
        return {name: mapped_texts(inner, change) for name, inner in value.items()}
    return change(value) if isinstance(value, str) and value else value


def is_utf8(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8; half a character (a lone surrogate) cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def typed(value: Any) -> str:
    """A value for a message, on one line, in the syntax of settings."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        fits = value.strip() == value != "" and value.isprintable() and len(value) <= MAX_SHOWN_CHARACTERS
        return value if fits else shown(value)
    if isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(typed, value))}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{name}: {typed(inner)}' for name, inner in value.items())}}}"
    else:
        text = str(value)
    return _cut(text)


def shown(value: Any) -> str:
    """A value for a message, on one line, in Python's syntax."""
    try:
        text = repr(value)
    except Exception:  # repr() fails for half-made objects, deep nesting and numbers with thousands of digits
        text = f"<{type(value).__name__}>"
    if "\n" in text:
        text = " ".join(text.split())
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
