"""Read YAML and JSON that people write."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpclm import files
from hpclm.errors import ConfigError, unread

LARGEST = 4 << 20  # bytes of a settings file
DIGITS = 400  # of a number; the largest float has 309
NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}


class Loader(yaml.SafeLoader):
    """YAML without aliases, in which duplicate keys are an error; 10:00:00 is text (not base 60), and so is 0123 (not base 8)."""

    yaml_implicit_resolvers: dict = {  # noqa: RUF012
        first: [(tag, NUMBERS.get(tag, pattern)) for tag, pattern in rows]
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
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _wrong(key, "a key must be a word, not a list or a mapping")
            if key.value in seen:
                raise _wrong(key, f"key {key.value!r} appears twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Content:
    """The content of a settings file."""

    text: str
    tree: dict
    exposed: str | None
    """How another user could have written it; None if only this user and root could."""


def value(text: str) -> Any:
    """The value of a YAML text; yaml.YAMLError if it is not valid."""
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
        raw, status = files.read(path, LARGEST)
        text = raw.decode("utf-8")
        tree = value(text)
    except OSError as error:
        raise unread(error, f"{what} {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} is not YAML: {' '.join(str(error).split())}") from None
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{what} {path} must be a mapping of sections, not a {type(tree).__name__}")
    return Content(text, tree or {}, files.exposed(path, status))


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ConfigError if there is none."""
    path = files.readable(path, "file")
    try:
        tree = json.loads(files.read_text(path))
    except OSError as error:
        raise unread(error, path) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold an object, not a {type(tree).__name__}")
    return tree


def _wrong(at: Any, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)
