"""YAML as a person means it."""

import re
from pathlib import Path
from typing import Any

import yaml

from hpclm.errors import ConfigError

NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}


class Loader(yaml.SafeLoader):
    """YAML as it is, but a key that stands twice is an error: the first one would be lost without a word.

    And 10:00:00 is text, not a number to the base of 60, and so is 0123, not a number to the base of 8.
    """

    yaml_implicit_resolvers: dict = {  # noqa: RUF012
        first: [(tag, NUMBERS.get(tag, pattern)) for tag, pattern in rows]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """A mapping whose keys stand once each."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def value(text: str) -> Any:
    """What ``text`` stands for; yaml.YAMLError where it is not YAML."""
    return yaml.load(text, Loader=Loader)


def mapping(path: Path, what: str) -> dict:
    """The mapping that the file holds, {} where it is empty; ConfigError calls it ``what``."""
    try:
        content = value(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{what} {path} must be a mapping of sections, not a {type(content).__name__}")
    return content
