"""Read YAML and JSON that people write. A YAML value stays a node, with its text and its place, until its type is known."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpclm.base import files, folders
from hpclm.base.errors import ConfigError, unread

MAX_SETTINGS_BYTES = 4 << 20  # bytes of a settings file
DIGITS = 400  # limit for numbers; the largest float has 309
NUMBER = re.compile(r"[-+]?(0x[\da-f_]+|0b[01_]+|(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(e[-+]?\d+)?)", re.ASCII | re.IGNORECASE)
LEADING_ZERO = re.compile(r"[-+]?0[\d_]")
CONSTANTS: dict[str, Any] = {
    "true": True,
    "false": False,
    ".inf": float("inf"),
    "-.inf": -float("inf"),
    ".nan": float("nan"),
}
"""Unquoted words, in upper or lower case, and their values in fields without a declared type."""
NULLS = ("", "~", "null", "Null", "NULL")
COMMAND_LINE = "command line"
TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


@dataclass(frozen=True)
class Content:
    """The content of a settings file."""

    text: str
    root: yaml.MappingNode
    problems: list[str]
    """Repeated keys, aliases, tags and merge keys, each with its line; ``root`` does not contain them."""
    exposed: str | None
    """How another user could have written it; None if only this user and root could."""


def nodes(text: str, origin: str, line: int = 0) -> tuple[yaml.Node, list[str]]:
    """The nodes of a YAML text without repeated keys, aliases, tags and merge keys, and a problem for each of these.

    yaml.YAMLError if the text is invalid. ``origin``: the file, or COMMAND_LINE. ``line``: the text's first line in the file, from 0.
    """
    loader = yaml.BaseLoader(text)
    loader.name = origin
    loader.line = line
    problems: list[str] = []
    try:
        root = loader.get_single_node()
        if root is not None:
            _clean(root, root, {}, problems)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # \UFFFFFFFF, %YAML with too many digits
        raise yaml.YAMLError(f"it has an invalid value: {error}") from None
    return root or scalar("", origin), problems


def scalar(text: str, origin: str | yaml.Mark = COMMAND_LINE, quoted: bool = False) -> yaml.ScalarNode:
    """A node for a text of ``origin``."""
    if isinstance(origin, str):
        origin = yaml.Mark(origin, 0, 0, 0, None, 0)
    return yaml.ScalarNode(TAGS[0], text, origin, origin, '"' if quoted else None)


def node(value: Any, mark: yaml.Mark) -> yaml.Node:
    """A node for a value in Python's types."""
    if isinstance(value, dict):
        pairs = [(scalar(str(name), mark), node(inner, mark)) for name, inner in value.items()]
        return yaml.MappingNode(TAGS[2], pairs, mark, mark)
    if isinstance(value, (list, tuple)):
        return yaml.SequenceNode(TAGS[1], [node(inner, mark) for inner in value], mark, mark)
    if value is None:
        return scalar("null", mark)
    return scalar(str(value), mark, isinstance(value, str))


def with_texts(node: yaml.Node, change: Callable[[str], str] = str) -> yaml.Node:
    """``node`` with each text and number in it passed through ``change`` and put in quotes."""
    if isinstance(node, yaml.SequenceNode):
        return yaml.SequenceNode(
            node.tag, [with_texts(entry, change) for entry in node.value], node.start_mark, node.end_mark
        )
    if isinstance(node, yaml.MappingNode):
        entries = [(name, with_texts(entry, change)) for name, entry in node.value]
        return yaml.MappingNode(node.tag, entries, node.start_mark, node.end_mark)
    if is_null(node):
        return node
    return scalar(change(node.value), node.start_mark, quoted=True)


def place(node: yaml.Node) -> str:
    """The place of a node: a file and its line, or the command line."""
    origin: str = node.start_mark.name
    if origin == COMMAND_LINE:
        return origin
    return f"{origin}:{line(node)}"


def where(node: yaml.Node) -> str:
    """The place of a node for the end of a message; empty for an UnplacedWord."""
    return f" ({place(node)})" if node.start_mark.name else ""


def line(node: yaml.Node) -> int:
    """The line of a node in its file."""
    return int(node.start_mark.line) + 1


def in_lines(first: yaml.Node, second: yaml.Node) -> str:
    """The two lines of a repeated key for a message; empty if they are the same line."""
    if line(first) == line(second):
        return ""
    return f", in lines {line(first)} and {line(second)}"


def _clean(node: yaml.Node, at: yaml.Node, seen: dict[int, bool], problems: list[str]) -> bool:
    """Remove unsupported YAML from ``node``, the value of the key ``at``, and report it; False if nothing is left.

    ``seen``: the ids of earlier nodes, and whether an alias of each is already reported.
    """
    if id(node) in seen:
        if not seen[id(node)]:
            problems.append(f"aliases (*name) are not supported; repeat the value{where(at)}")
        seen[id(node)] = True
        return False
    seen[id(node)] = False
    if node.tag not in TAGS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        problems.append(f"tags ({tag}) are not supported; leave it out{where(node)}")
    if isinstance(node, yaml.SequenceNode):
        node.value = [entry for entry in node.value if _clean(entry, at, seen, problems)]
    elif isinstance(node, yaml.MappingNode):
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if wrong := _wrong_key(key, pairs):
                problems.append(f"{wrong}{where(key)}")
            elif _clean(value, key, seen, problems):
                pairs[key.value] = key, value
        node.value = list(pairs.values())
    return True


def _wrong_key(key: yaml.Node, before: Mapping[str, tuple[yaml.Node, yaml.Node]]) -> str:
    if not isinstance(key, yaml.ScalarNode):
        return "a key must be a word, not a list or a mapping"
    if key.value == "<<" and key.style is None:
        return "merge keys (<<) are not supported; repeat the values"
    if key.value in before:
        return f"key {key.value!r} appears twice{in_lines(before[key.value][0], key)}"
    return ""


def plain(node: yaml.Node) -> Any:
    """``node`` in Python's types, without a declared type. An unquoted scalar may be null, true, false or a number; all else is text."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [plain(entry) for entry in node.value]
    text: str = node.value
    if is_null(node):
        return None
    if not isinstance(node, yaml.ScalarNode) or node.style is not None or LEADING_ZERO.match(text):
        return text
    found = number(text)
    return CONSTANTS.get(text.lower(), text) if found is None else found


def is_null(node: yaml.Node) -> bool:
    """Whether a node is null, ~ or nothing, without quotes."""
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULLS


def number(text: str) -> int | float | None:
    """``text`` as a number, such as 0x10, 1_000 or 1e3; None for other text."""
    if len(text) > DIGITS or not NUMBER.fullmatch(text):
        return None
    with suppress(ValueError):
        return int(text, 0)
    with suppress(ValueError):
        return float(text)
    return None  # 1__0


def value(text: str) -> Any:
    """The value of a YAML text in Python's types; yaml.YAMLError for invalid or unsupported YAML."""
    root, problems = nodes(text, COMMAND_LINE)
    if problems:
        raise yaml.YAMLError("; ".join(problems))
    return plain(root)


def reason(error: ValueError | yaml.YAMLError) -> str:
    """Why parsing failed, on one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    text = ", ".join(filter(None, [error.context, error.problem]))
    if r"'\t' that cannot start" in text:
        text += "; indent with spaces, not with a tab"
    return text


def content(path: Path, what: str) -> Content:
    """The mapping in a YAML file; an empty file is an empty mapping. ConfigError, which calls the file ``what``, for other content."""
    try:
        raw, status = files.read_with_status(path, MAX_SETTINGS_BYTES)
        text = raw.decode("utf-8")
        root, problems = nodes(text, str(path))
    except OSError as error:
        raise unread(error, f"{what} {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line_of_file = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{what} {path}{line_of_file} is not YAML: {reason(error)}") from None
    if is_null(root):
        root = node({}, root.start_mark)
    if not isinstance(root, yaml.MappingNode):
        kind = "list" if isinstance(root, yaml.SequenceNode) else "text"
        raise ConfigError(f"{what} {path} must be a mapping of sections, not a {kind}")
    return Content(text, root, problems, folders.exposed(path, status))


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ConfigError for any other content."""
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
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        raise ValueError(f"key {twice[0]!r} appears twice")
    return dict(pairs)
