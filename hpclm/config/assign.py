"""Assign settings one by one to a RunConfig, collecting every problem. The only file that imports omegaconf."""

import re
import typing
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, OmegaConfBaseException

from hpclm.config import hints
from hpclm.config.fields import as_yaml, keys, required, split_key, type_of, type_words
from hpclm.config.schema import RunConfig
from hpclm.errors import ConfigError
from hpclm.registry import hint

Assignment = tuple[str, Any, str]
"""Dotted key, value, and where it was given."""
LARGEST = 2**63 - 1  # integers beyond 64 bits are refused
LONGEST = 200  # characters of a value in a message


@dataclass(frozen=True)
class Unreadable:
    """A value on the command line that is not YAML."""

    text: str
    reason: str
    """``: `` and what is wrong with it, or empty."""


def build(assignments: list[Assignment], problems: list[str]) -> RunConfig:
    """The settings after all ``assignments``; ConfigError with ``problems`` and everything else that is wrong."""
    tree = OmegaConf.structured(RunConfig)
    OmegaConf.set_readonly(tree, False)
    broken = []
    accumulated = []
    for key, value, origin in assignments:
        wrong = _assign(tree, key, value)
        if wrong and type_of(key) is None and hints.is_accumulation(key, keys()):
            accumulated.append((wrong, value, origin))
        elif wrong:
            broken += [key] if type_of(key) else []
            problems.append(f"{wrong} ({origin})")
    problems += [f"{wrong}{_accumulated(tree, value)} ({origin})" for wrong, value, origin in accumulated]
    sections: dict[str, Any] = {}
    for field in fields(RunConfig):
        try:
            sections[field.name] = _typed(field.type, tree[field.name])
        except ConfigError as error:
            problems += error.problems
        except OmegaConfBaseException as error:
            problems.append(f"{field.name}: {_uninserted(error)}")
    if not problems:
        return RunConfig(**sections)
    try:
        RunConfig(**sections)
    except ConfigError as error:  # without problems that only follow from a key reported above
        problems += [p for p in error.problems if p not in problems and not any(key in p for key in broken)]
    raise ConfigError(problems)


def _assign(tree: Any, key: str, value: Any) -> str | None:
    """Set one setting; returns what is wrong with it, or None."""
    wanted = type_of(key)
    if isinstance(value, Unreadable):
        return f"{_said(key, value.text)} is not a YAML value{'' if _may_be_secret(key) else value.reason}"
    if wanted is None and hints.is_variable(key):
        return f"{key} is an environment variable, not a setting: export it where you start or submit the run"
    if wanted is None:
        return f"unknown setting {key}{hints.hint(key, keys())}"
    kind, words = required(wanted), type_words(wanted)
    if is_dataclass(wanted):
        return f"{key} is a section; set its fields, such as {key}.{fields(wanted)[0].name}=…"
    if value is None and kind is wanted:
        return f"{key} must be {words}, not empty"
    if wanted in (int, float, str) and isinstance(value, (list, dict)):
        return f"{key}={_shown(value)} must be {words}"
    if not all(map(_storable, texts(value))):
        return f"{_said(key, value)} contains a character that cannot be stored in a file"
    if kind is str and isinstance(value, bool):
        return f"{key} must be {words}; YAML reads this word as {str(value).lower()}, so put quotes around it"
    field, name = split_key(key)
    if typing.get_origin(type_of(field)) is dict:
        return _add_to_mapping(tree, field, {name: value} if name else value)
    if key.startswith("job."):
        value = literal(value)
    if key == "batch.micro_size" and value in ("auto", 0):
        if value == 0:
            return f"{key}=0 must be at least 1, or auto"
        value = 0
    if kind is int and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        value = _whole(value)  # accepts 1e6 and 1_000_000
        if isinstance(value, int) and abs(value) > LARGEST:
            return f"{key}={_shown(value)} must be {words} of at most {LARGEST:,}"
    if kind in (int, float) and isinstance(value, bool):
        return f"{key}={_shown(value)} must be {words}"
    section, _, _ = key.rpartition(".")
    OmegaConf.set_readonly(OmegaConf.select(tree, section) if section else tree, False)
    before = OmegaConf.select(tree, key)
    try:
        OmegaConf.update(tree, key, value, merge=False)
        _plain(wanted, OmegaConf.select(tree, key))
    except (OmegaConfBaseException, ValueError, OverflowError) as error:
        OmegaConf.update(tree, key, before, merge=False)
        if isinstance(error, InterpolationResolutionError):
            return f"{key}={_shown(value)}: {_uninserted(error)}"
        near = hint(str(value), [str(choice) for choice in typing.get_args(wanted)]) or _spelled(key, kind, value)
        return f"{key}={_shown(value)} must be {words}{'.' * near.startswith(' ')}{near}"
    return None


def _spelled(key: str, kind: Any, value: Any) -> str:
    """``: `` and how ``value`` is written so that it is of that kind, if that is clear; else empty."""
    if kind == list[str] and isinstance(value, (str, int, float)):
        return f": {key}=[{value}]"
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([KMBGT])", str(value), re.IGNORECASE)
    if kind is not int or not found:
        return ""
    power = {"K": 3, "M": 6, "B": 9, "G": 9, "T": 12}[found[2].upper()]
    meant = round(Decimal(found[1]) * 10**power)
    return f": {meant}, or {found[1]}e{power}"


def _uninserted(error: OmegaConfBaseException) -> str:
    """Why a value's ${...} cannot be replaced."""
    said = str(error).splitlines()[0]
    if not isinstance(error, InterpolationKeyError):
        return said
    return f"{said}: ${{...}} inserts another setting, such as ${{name}}; environment variables are expanded only in job.setup"


def _accumulated(tree: Any, steps: Any) -> str:
    """The batch.global_size that so many accumulation steps mean with the other settings, for a message; "" if unknown."""
    micro, many = tree.batch.micro_size, _whole(steps) if isinstance(steps, (int, float, str)) else None
    if type(many) is not int or not 0 < many * micro <= LARGEST:
        return ""
    replicas = tree.job.nodes * tree.job.gpus // max(1, tree.parallel.tensor * tree.parallel.pipeline)
    if replicas > 1:
        return f"; here {micro} x {many} x {replicas}, which is batch.global_size={micro * many * replicas}"
    return f"; here {micro} x {many} x replicas: batch.global_size={micro * many} on one GPU"


def _add_to_mapping(tree: Any, key: str, value: Any) -> str | None:
    """Add entries to the mapping ``key``; {} empties it. Returns what is wrong, or None."""
    if not isinstance(value, dict):
        return f"{_said(key, value)} must be {type_words(type_of(key))}"
    if key == "engine.extra":
        value = dict(_flattened("", value))
    for name, text in value.items():
        if text is None and ":" in str(name):  # {NAME:value} is one name
            return (
                f"{key} has no space after the ':' of {str(name).partition(':')[0]}, which YAML needs (value not shown)"
            )
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            return f"{_said(f'{key}.{name}', text)} must be text; put quotes around it"
    OmegaConf.set_readonly(OmegaConf.select(tree, key.rpartition(".")[0]), False)
    before = OmegaConf.to_container(OmegaConf.select(tree, key), resolve=True) if value else {}
    added = {str(name): str(text) for name, text in value.items()}
    OmegaConf.update(tree, key, literal({**typing.cast(dict, before), **added}), merge=False)
    return None


def _flattened(prefix: str, tree: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Nested engine.extra settings as dotted names, each with its value as text."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flattened(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else as_yaml(value)


def literal(value: Any) -> Any:
    """``value`` with ${...} escaped: it is meant for a shell or another program, not for omegaconf. Tuples become lists."""
    if isinstance(value, dict):
        return {name: literal(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [literal(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def texts(value: Any) -> Iterator[str]:
    """All text in a value, names in its mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from texts(inner)


def _storable(text: str) -> bool:
    return not re.search("[\0\ud800-\udfff]", text)  # NUL bytes and lone surrogates


def _may_be_secret(key: str) -> bool:
    """Whether the values of a setting are for other programs, and so may be secrets."""
    return key.startswith(("job.env", "job.options"))


def _said(key: str, value: Any) -> str:
    """A setting and its value, for a message."""
    return key if _may_be_secret(key) else f"{key}={_shown(value)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _whole(value: float | str) -> Any:
    """``value`` as an integer if it is one; otherwise unchanged."""
    if isinstance(value, str):
        with suppress(ValueError):
            return int(value)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return value
    return int(number) if not isinstance(value, int) and number.is_integer() else value


def _typed(wanted: Any, node: Any) -> Any:
    """The value of a node of the tree; for a section an instance of its class, which checks itself."""
    if is_dataclass(wanted):
        return typing.cast(Any, wanted)(**{f.name: _plain(f.type, node[f.name]) for f in fields(wanted)})
    return _plain(wanted, node)


def _plain(wanted: Any, value: Any) -> Any:
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    inner = required(wanted)
    if typing.get_origin(inner) is not tuple or value is None:
        return value
    kinds = typing.get_args(inner)
    if len(value) != len(kinds):
        raise ValueError(f"wants {len(kinds)} values")
    found = tuple(kind(v) for kind, v in zip(kinds, value, strict=True))
    if any(abs(number) > LARGEST for number in found):
        raise ValueError("is too large")
    return found
