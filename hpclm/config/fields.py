"""The settings by dotted key: their fields, their types in Python and in words, and their values as YAML."""

import re
import types
import typing
from dataclasses import Field, fields, is_dataclass
from typing import Any

import yaml

from hpclm.config import reading
from hpclm.config.schema import RunConfig
from hpclm.config.section import all_fields
from hpclm.config.setting import Declared, declared

UNITS = {unit: unit for unit in ("seconds", "minutes", "hours", "steps", "samples", "tokens", "epochs")} | {"mb": "MB"}
"""The unit of a number, by the last part of its setting's name."""
WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
WORDS |= {list[str]: "a list of text", dict[str, str]: "a mapping of names to text"}
FIELDS = dict(all_fields(RunConfig))
"""The field of every setting, by dotted key."""


def keys() -> list[str]:
    """Every setting's dotted key, in the order of the schema."""
    return [*FIELDS]


def type_of(key: str) -> Any:
    """Declared type of a dotted key; None if the schema has no such key."""
    kind: Any = RunConfig
    for part in key.split("."):
        if typing.get_origin(kind) is dict:  # the rest of the key is a name in the mapping, dots included
            return typing.get_args(kind)[1]
        if not is_dataclass(kind):
            return None
        kind = {entry.name: entry.type for entry in fields(kind)}.get(part)
    return kind


def path_separator(key: str) -> str | None:
    """The separator of paths in a value; empty if a value is one path, None if the setting holds no paths."""
    declaration = declaration_of(key)
    return None if declaration is None else declaration.path


def declaration_of(key: str) -> Declared | None:
    """The declaration of a setting by its dotted key; None for a name in a mapping."""
    return declared(FIELDS[key]) if key in FIELDS else None


def required(kind: Any) -> Any:
    """`X` of `X | None`; any other type unchanged."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:  # Literal | None is the latter
        return next(member for member in typing.get_args(kind) if member is not types.NoneType)
    return kind


def split_key(key: str) -> tuple[str, str | None]:
    """The setting of a dotted key, and the name inside its value if the value is a mapping."""
    for dot in re.finditer(r"\.", key):
        setting = key[: dot.start()]
        if typing.get_origin(type_of(setting)) is dict:
            return setting, key[dot.end() :]
    return key, None


def type_text(kind: Any) -> str:
    """A type in plain words, for messages and the reference page."""
    inner = required(kind)
    arguments = typing.get_args(inner)
    others = {
        typing.Literal: f"one of {', '.join(map(str, arguments))}",
        tuple: f"a list of {len(arguments)} numbers",
        list: "a list of mappings",
        dict: "a mapping of names to values",
    }
    origin = dict if typing.is_typeddict(inner) else typing.get_origin(inner)
    text = WORDS.get(inner) or others.get(origin, str(inner))
    if inner is not kind:
        text += " or null"
    return text


def kind_text(entry: Field) -> str:
    """The type of a field in plain words, with the unit that is declared or that ends its name."""
    inner = required(entry.type)
    unit = declared(entry).unit or UNITS.get(entry.name.rpartition("_")[2])
    text = type_text(entry.type)
    if unit and inner in (int, float):
        return text.replace(WORDS[inner], f"{WORDS[inner]} of {unit}")
    return text


class _OneLine(yaml.SafeDumper):
    """YAML without line breaks inside text."""


def _text(dumper: _OneLine, text: str) -> yaml.Node:
    style = '"' if text.splitlines() not in ([], [text]) or reading.plain(reading.scalar(text)) != text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_OneLine.add_representer(str, _text)


def as_yaml(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.dump(value, Dumper=_OneLine, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n...\n").strip()


def as_word(value: Any) -> str:
    """A value as it is written in key=value: text verbatim, any other value as YAML."""
    return value if isinstance(value, str) else as_yaml(value)


def flattened(tree: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys -> nested mappings."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return tree


def docs(section: type) -> dict[str, str]:
    """The documentation of every setting, by its key inside the section."""
    return {key: declared(entry).text for key, entry in all_fields(section)}
