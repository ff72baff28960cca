"""Convert the text of a setting to its declared type, or report everything that is wrong with the text."""

import re
import shlex
import sys
import typing
from decimal import Decimal
from typing import Any

import yaml

from hpclm.base.errors import ConfigError
from hpclm.base.registry import hint
from hpclm.config.checks import MAX_INTEGER, shown
from hpclm.config.fields import required, type_text
from hpclm.config.job import JobConfig
from hpclm.config.reading import DIGITS, is_null, nodes, number, plain, where
from hpclm.config.section import all_fields
from hpclm.config.setting import declared

BOOLS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
NOT_FINITE = re.compile(r"[-+]?\.?(inf|nan)", re.IGNORECASE)
SECRET = tuple(key for key, entry in all_fields(JobConfig, "job") if declared(entry).secret)
"""Settings that may hold secrets; messages do not show their values."""


def typed(key: str, node: yaml.Node, kind: Any) -> Any:
    """``node``, the value of ``key``, as a value of ``kind``; ConfigError with every problem and its place."""
    inner = required(kind)
    if inner is Any:
        return plain(node)
    if is_null(node):
        if inner is not kind:
            return None
        word = f"; if you mean the word {node.value}, put quotes around it" if node.value and inner is str else ""
        raise ConfigError(f"{key} must be {type_text(kind)}, not empty{word}{where(node)}")
    form = typing.get_origin(inner)
    if form in (list, tuple):
        return _elements(key, opened(node), kind)
    if form is dict or typing.is_typeddict(inner):
        return _entries(key, opened(node), kind)
    if not isinstance(node, yaml.ScalarNode):
        raise refused(key, node, kind)
    if inner is str:
        return node.value
    value = _scalar(node.value.strip(), inner)
    if value is None:
        raise refused(key, node, kind)
    if inner is int and abs(value) > MAX_INTEGER:
        raise refused(key, node, kind, f" of at most {MAX_INTEGER:,}")
    return value


def opened(node: yaml.Node) -> yaml.Node:
    """The list or mapping that is written in brackets inside a text; any other node unchanged."""
    if not isinstance(node, yaml.ScalarNode) or not node.value.lstrip().startswith(("[", "{")):
        return node
    try:
        inside, problems = nodes(node.value, node.start_mark.name, node.start_mark.line)
    except yaml.YAMLError:
        return node
    return node if problems else inside


def refused(key: str, node: yaml.Node, kind: Any, more: str = "") -> ConfigError:
    """The error for a value that is not of ``kind``. It says how to write the value, if that is clear."""
    value = plain(node)
    inner = required(kind)
    sentence = f"{shown_setting(key, value)} must be {type_text(kind)}{more}"
    if typing.get_origin(inner) is typing.Literal:
        near = hint("cuda" if value == "gpu" else str(value), list(typing.get_args(inner)))
        sentence += f".{near}" if near else ""
    elif inner in (int, float) and isinstance(value, str) and len(value) > DIGITS:
        sentence += f": it has {len(value)} digits, and at most {DIGITS} are allowed"
    else:
        sentence += _as_meant(key, inner, value)
    return ConfigError(f"{sentence}{where(node)}")


def shown_setting(key: str, value: Any) -> str:
    """A setting and its value for a message; the key alone if the value may be a secret."""
    return key if key.startswith(SECRET) else f"{key}={shown(value)}"


def _scalar(text: str, kind: Any) -> Any:
    """``text`` as a number, a bool or one of the words of ``kind``; None if it is invalid."""
    if typing.get_origin(kind) is typing.Literal:
        return text if text in typing.get_args(kind) else None
    if kind is bool:
        return BOOLS.get(text.lower())
    if kind is float and NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    value = number(text)
    if value is None or (kind is float and abs(value) > sys.float_info.max) or (kind is int and value != value // 1):
        return None
    return kind(value)


def _elements(key: str, node: yaml.Node, kind: Any) -> Any:
    form = typing.get_origin(required(kind))
    kinds = typing.get_args(required(kind))
    if not isinstance(node, yaml.SequenceNode) or (form is tuple and len(node.value) != len(kinds)):
        raise refused(key, node, kind)
    if form is list:
        kinds *= len(node.value)
    keys = [f"{key}[{index}]" for index in range(len(kinds))]
    return form(_all(list(zip(keys, node.value, kinds, strict=True))))


def _entries(key: str, node: yaml.Node, kind: Any) -> dict[str, Any]:
    """The entries of a mapping; each name of a TypedDict has its own type."""
    inner = required(kind)
    if not isinstance(node, yaml.MappingNode):
        raise refused(key, node, kind)
    declared: dict[str, Any] = {}
    other: Any = Any
    if typing.is_typeddict(inner):
        declared = typing.get_type_hints(inner)
    else:
        other = typing.get_args(inner)[1]
    pairs = [(name.value, value) for name, value in node.value]
    values = _all([(f"{key}.{name}", value, declared.get(name, other)) for name, value in pairs])
    return {name: value for (name, _), value in zip(pairs, values, strict=True)}


def _all(named: list[tuple[str, yaml.Node, Any]]) -> list[Any]:
    """The values of several nodes; ConfigError with the problems of all."""
    values: list[Any] = []
    problems: list[str] = []
    for key, node, kind in named:
        try:
            values.append(typed(key, node, kind))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return values


def _as_meant(key: str, kind: Any, value: Any) -> str:
    """The end of the error: a colon, and ``value`` as it should be written. Empty if the intent is unclear."""
    if kind == list[str] and isinstance(value, (str, int, float)):
        element = "..." if key.startswith(SECRET) else value
        return f": {shlex.quote(f'{key}=[{element}]')}"
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([KMBGT])", str(value), re.IGNORECASE)
    if kind is not int or not match:
        return ""
    power = {"K": 3, "M": 6, "B": 9, "G": 9, "T": 12}[match[2].upper()]
    return f": {round(Decimal(match[1]) * 10**power)}, or {match[1]}e{power}"
