"""Values of settings in messages, and the text in them."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

MAX_INTEGER = 2**63 - 1  # integers beyond 64 bits are refused
MAX_SHOWN_CHARACTERS = 200  # characters of a value in a message


class RefusedError(Exception):
    """The value of a setting is refused, and a rule reads it."""


def value_at(section: Any, key: str) -> Any:
    """The value of a dotted key, which lies in ``section`` or is its own."""
    name = getattr(section, "key", "")
    return section if key == name else attrgetter(key.removeprefix(f"{name}."))(section)


def named(section: Any, key: str) -> str:
    """A setting of ``section`` with its value, as it is typed."""
    return f"{key}={typed(value_at(section, key))}"


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
