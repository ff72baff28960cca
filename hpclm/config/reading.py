"""Read YAML and JSON that people write."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpclm import files, folders
from hpclm.errors import ConfigError, unread

MAX_SETTINGS_BYTES = 4 << 20  # bytes of a settings file
DIGITS = 400  # of a number; the largest float has 309
NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}
TEXT = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value", "tag:yaml.org,2002:merge")
"""Forms that YAML gives a meaning and settings do not: 2024-11-26, = and << are text."""


class _AsTyped:
    """A number that prints as it was typed: text settings keep 3.10, 0xff and 1_000."""

    text: str

    def __repr__(self) -> str:
        return self.text


class TypedInt(_AsTyped, int):
    """An integer, and how it was typed."""


class TypedFloat(_AsTyped, float):
    """A float, and how it was typed."""


class Key(str):
    """A key of a mapping, as it was typed, and the number of its line."""

    line: int


class Loader(yaml.SafeLoader):
    """YAML without aliases, in which duplicate keys are an error, keys are text, and numbers know how they were typed; 10:00:00 is
    text (not base 60), and so is 0123 (not base 8)."""

    yaml_implicit_resolvers: dict = {  # noqa: RUF012
        first: [(tag, NUMBERS.get(tag, pattern)) for tag, pattern in rows if tag not in TEXT]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """A node; no aliases, which can multiply a small file into a huge one, and no endless numbers."""
        if self.check_event(yaml.AliasEvent):
            raise _wrong(self.peek_event(), "aliases (*name) are not supported; repeat the value")
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and len(node.value) > DIGITS and node.tag in NUMBERS:
            raise _wrong(node, f"a number has {len(node.value)} digits; at most {DIGITS} are allowed")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """A mapping with unique scalar keys."""
        if not isinstance(node, yaml.MappingNode):
            raise _wrong(node, "it must be a mapping")
        mapping: dict[Key, Any] = {}
        lines: dict[str, int] = {}
        for name, inner in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise _wrong(name, "a key must be a word, not a list or a mapping")
            if name.value == "<<" and name.style is None:
                raise _wrong(name, "merge keys (<<) are not supported; repeat the values")
            key = Key(name.value)
            key.line = name.start_mark.line + 1
            if key in lines:
                raise _wrong(name, f"key {name.value!r} appears twice{in_lines(lines[key], key.line)}")
            lines[key] = key.line
            mapping[key] = self.construct_object(inner, deep=True)
        return mapping

    def construct_typed_int(self, node: yaml.ScalarNode) -> TypedInt:
        """An integer that knows how it was typed."""
        number = TypedInt(self.construct_yaml_int(node))
        number.text = node.value
        return number

    def construct_typed_float(self, node: yaml.ScalarNode) -> TypedFloat:
        """A float that knows how it was typed."""
        number = TypedFloat(self.construct_yaml_float(node))
        number.text = node.value
        return number


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_typed_int)
Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_typed_float)


@dataclass(frozen=True)
class Content:
    """The content of a settings file."""

    text: str
    tree: dict
    exposed: str | None
    """How another user could have written it; None if only this user and root could."""


def in_lines(first: int, second: int) -> str:
    """Where a key is that appears twice; empty where the line does not tell."""
    return f", in lines {min(first, second)} and {max(first, second)}" if first != second else ""


def value(text: str) -> Any:
    """The value of a YAML text, in Python's types; yaml.YAMLError if it is not valid."""
    return plain(typed(text))


def plain(value: Any) -> Any:
    """``value`` in Python's types, without how numbers were typed."""
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return int(value) if isinstance(value, TypedInt) else float(value) if isinstance(value, TypedFloat) else value


def number(text: str) -> float | None:
    """The number that ``text`` is in YAML or in Python, such as 0x10, 1_000 or 1e3; None if it is none."""
    try:
        return value(text) if any(form.match(text) for form in NUMBERS.values()) else float(text)
    except (ValueError, yaml.YAMLError):
        return None


def typed(text: str) -> Any:
    """The value of a YAML text, whose numbers and keys know how they were typed; yaml.YAMLError if it is not valid."""
    try:
        return yaml.load(text, Loader=Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        # a scalar that does not match its form or tag: February 31, !!int x
        raise yaml.YAMLError(f"it has an invalid value: {error}") from None


def content(path: Path, what: str) -> Content:
    """The mapping in a YAML file, {} if it is empty; ConfigError, which calls the file ``what``, if there is none."""
    try:
        raw, status = files.read(path, MAX_SETTINGS_BYTES)
        text = raw.decode("utf-8")
        tree = typed(text)
    except OSError as error:
        raise unread(error, f"{what} {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        tab = "; indent with spaces, not with a tab" * (r"'\t' that cannot start" in str(error))
        raise ConfigError(f"{what} {path} is not YAML: {' '.join(str(error).split())}{tab}") from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{what} {path} must be a mapping of sections, not a {type(tree).__name__}")
    return Content(text, tree or {}, folders.exposed(path, status))


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ConfigError if there is none."""
    path = files.readable(path, "file")
    try:
        tree = json.loads(files.read_text(path), object_pairs_hook=_unique)
    except OSError as error:
        raise unread(error, path) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold an object, not a {type(tree).__name__}")
    return tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError if a key appears twice."""
    keys = [key for key, _ in pairs]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"key {twice!r} appears twice")
    return dict(pairs)


def _wrong(at: Any, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)
