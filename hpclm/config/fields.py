"""The fields of the schema by dotted key: their types, in Python and in words, and their values as YAML."""

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
WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def keys() -> list[str]:
    """Every setting's dotted key, in the order of the schema."""
    return [key for key, _ in all_fields(RunConfig)]


def type_of(key: str) -> Any:
    """Declared type of a dotted key; None if the schema has no such key."""
    kind: Any = RunConfig
    for part in key.split("."):
        if typing.get_origin(kind) is dict:  # the rest of the key is a name in the mapping, dots included
            return typing.get_args(kind)[1]
        types_here = {f.name: f.type for f in fields(kind)} if is_dataclass(kind) else {}
        if part not in types_here:
            return None
        kind = types_here[part]
    return kind


def path_separator(key: str) -> str | None:
    """The separator of paths in a value; empty if a value is one path, None if the setting holds no paths."""
    declaration = declaration_of(key)
    return None if declaration is None else declaration.path


def declaration_of(key: str) -> Declared | None:
    """The declaration of a setting by its dotted key; None for a name in a mapping."""
    section, _, name = key.rpartition(".")
    kind: Any = type_of(section) if section else RunConfig
    named = (field for field in (fields(kind) if is_dataclass(kind) else ()) if field.name == name)
    return next((declared(field) for field in named), None)


def required(kind: Any) -> Any:
    """`X` of `X | None`; any other type unchanged."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:  # Literal | None is the latter
        return next(member for member in typing.get_args(kind) if member is not types.NoneType)
    return kind


def split_key(key: str) -> tuple[str, str | None]:
    """The field of a dotted key, and the name inside the field if it is a mapping."""
    dots = [match.start() for match in re.finditer(r"\.", key)]
    mapping = next((key[:dot] for dot in dots if typing.get_origin(type_of(key[:dot])) is dict), None)
    return (key, None) if mapping is None else (mapping, key[len(mapping) + 1 :])


def type_text(kind: Any) -> str:
    """A type in plain words, for messages and the reference page."""
    inner = required(kind)
    text = {
        typing.Literal: f"one of {', '.join(map(str, typing.get_args(inner)))}",
        tuple: f"a list of {len(typing.get_args(inner))} numbers",
        list: "a list of text" if inner == list[str] else "a list of mappings",
        dict: "a mapping of names to values" if inner == dict[str, typing.Any] else "a mapping of names to text",
        None: WORDS.get(inner, str(inner)),
    }[typing.get_origin(inner)]
    return text + (" or null" if inner is not kind else "")


def kind_text(entry: Field) -> str:
    """The type of a field in plain words, with its unit, which its name may end with."""
    inner = required(entry.type)
    unit = declared(entry).unit or UNITS.get(entry.name.rpartition("_")[2], "")
    if not unit or inner not in (int, float):
        return type_text(entry.type)
    return f"{type_text(inner)} of {unit}{' or null' if inner is not entry.type else ''}"


class _OneLine(yaml.SafeDumper):
    """YAML without line breaks inside text."""


def _text(dumper: _OneLine, text: str) -> yaml.Node:
    style = '"' if text.splitlines() not in ([], [text]) or reading.plain(reading.scalar(text)) != text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_OneLine.add_representer(str, _text)


def as_yaml(value: Any) -> str:
    """One value as it is written in a settings file, on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.dump(plain, Dumper=_OneLine, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n...\n").strip()


def as_word(value: Any) -> str:
    """One value as a word key=value of a command line has it: text is verbatim there."""
    return value if isinstance(value, str) else as_yaml(value)


def flattened(tree: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat |= flattened(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
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
