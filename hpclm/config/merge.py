"""Merge settings into one RunConfig, collecting every problem. The only file that imports omegaconf."""

import re
import typing
from contextlib import suppress
from dataclasses import fields, is_dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, OmegaConfBaseException

from hpclm.config import hints, run_file
from hpclm.config.checks import texts
from hpclm.config.fields import as_yaml, flattened, keys, required, split_key, type_of, type_words
from hpclm.config.schema import RunConfig
from hpclm.errors import ConfigError
from hpclm.registry import hint

LARGEST = 2**63 - 1  # integers beyond 64 bits are refused
LONGEST = 200  # characters of a value in a message


class Setting(NamedTuple):
    """A value for a dotted key, and where it was given."""

    key: str
    value: Any
    origin: str


def merge(settings: list[Setting], problems: list[str]) -> RunConfig:
    """The defaults with all ``settings`` in their order; ConfigError with ``problems`` and everything else that is wrong."""
    tree = OmegaConf.structured(RunConfig)
    sections = [field.name for field in fields(RunConfig) if is_dataclass(field.type)]
    for node in [tree, *(tree[name] for name in sections)]:
        OmegaConf.set_readonly(node, False)
    refused = []
    for setting in settings:
        wrong = _set(tree, setting.key, setting.value)
        if wrong:
            problems.append(f"{wrong} ({setting.origin})")
            refused += [setting.key] if type_of(setting.key) else []
    parts: dict[str, Any] = {}
    for field in fields(RunConfig):
        try:
            parts[field.name] = OmegaConf.to_object(tree[field.name]) if field.name in sections else tree[field.name]
        except ConfigError as error:
            problems += error.problems
        except OmegaConfBaseException as error:
            problems.append(f"{field.name}: {_unresolved(error)}")
    try:
        run = RunConfig(**parts)
    except ConfigError as error:  # without problems that only follow from a setting reported above
        problems += [p for p in error.problems if p not in problems and not any(key in p for key in refused)]
    if problems:
        raise ConfigError(problems)
    return run


def _set(tree: Any, key: str, value: Any) -> str | None:
    """Set one setting; returns what is wrong with it, or None."""
    kind = type_of(key)
    if kind is None:
        return _unknown(key)
    if is_dataclass(kind):
        return f"{key} is a section; set its fields, such as {key}.{fields(kind)[0].name}=…"
    wrong = _unfit(key, kind, value)
    if wrong:
        return wrong
    mapping, name = split_key(key)
    if typing.get_origin(type_of(mapping)) is dict:
        return _add_to_mapping(tree, mapping, {name: value} if name else value)
    value = _normal(key, required(kind), value)
    if any(isinstance(each, int) and abs(each) > LARGEST for each in (value if isinstance(value, list) else [value])):
        return f"{key}={shown(value)} must be {type_words(kind)} of at most {LARGEST:,}"
    before = OmegaConf.select(tree, key)
    try:
        OmegaConf.update(tree, key, value, merge=False)
        OmegaConf.select(tree, key)  # resolves ${...}
    except (OmegaConfBaseException, ValueError, OverflowError) as error:
        OmegaConf.update(tree, key, before, merge=False)
        if isinstance(error, InterpolationResolutionError):
            return f"{key}={shown(value)}: {_unresolved(error)}"
        near = hint(str(value), [str(choice) for choice in typing.get_args(kind)]) or _as_meant(key, kind, value)
        return f"{key}={shown(value)} must be {type_words(kind)}{'.' * near.startswith(' ')}{near}"
    return None


def _unknown(key: str) -> str:
    if hints.is_variable(key):
        return f"{key} is an environment variable, not a setting: export it where you start or submit the run"
    if key in run_file.REMOVED:
        default, advice = run_file.REMOVED[key]
        return (
            f"{key} no longer exists; {advice or f'leave it out: hpclm always does what {key}={as_yaml(default)} did'}"
        )
    return f"unknown setting {key}{hints.hint(key, keys())}"


def _unfit(key: str, kind: Any, value: Any) -> str | None:
    """What is wrong with a value that OmegaConf would convert, or refuse less clearly."""
    inner, words = required(kind), type_words(kind)
    if value is None and inner is kind:
        return f"{key} must be {words}, not empty"
    if not all(map(_storable, texts(value))):
        return f"{shown_setting(key, value)} contains a character that cannot be stored in a file"
    if key == "batch.micro_size" and value == 0 and value is not False:
        return f"{key}=0 must be at least 1, or auto"
    if inner is str and isinstance(value, bool):
        return f"{key} must be {words}; YAML reads this word as {str(value).lower()}, so put quotes around it"
    scalar, structure = inner in (int, float, str), isinstance(value, (list, dict))
    if (scalar and structure) or (inner in (int, float) and isinstance(value, bool)):
        return f"{shown_setting(key, value)} must be {words}"
    return None


def _normal(key: str, kind: Any, value: Any) -> Any:
    """``value`` as OmegaConf takes it: 1e6 and 1_000_000 as integers, micro_size=auto as 0, ${...} of job.* as text."""
    if key == "batch.micro_size" and value == "auto":
        return 0
    if kind is int and isinstance(value, (int, float, str)):
        return _whole(value)
    return literal(value) if key.startswith("job.") else value


def _whole(value: float | str) -> Any:
    """``value`` as an integer if it is one; otherwise unchanged."""
    with suppress(ValueError):
        return int(value) if isinstance(value, (int, str)) else int(value) if value.is_integer() else value
    with suppress(ValueError):
        return int(float(value)) if float(value).is_integer() else value
    return value


def _add_to_mapping(tree: Any, key: str, value: Any) -> str | None:
    """Add entries to the mapping ``key``; {} empties it. Returns what is wrong, or None."""
    if not isinstance(value, dict):
        return f"{shown_setting(key, value)} must be {type_words(type_of(key))}"
    if key == "engine.extra":
        value = {name: inner if isinstance(inner, str) else as_yaml(inner) for name, inner in flattened(value).items()}
    for name, text in value.items():
        if text is None and ":" in str(name):  # {NAME:value} is one name
            return (
                f"{key} has no space after the ':' of {str(name).partition(':')[0]}, which YAML needs (value not shown)"
            )
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            return f"{shown_setting(f'{key}.{name}', text)} must be text; put quotes around it"
    added = literal({str(name): str(text) for name, text in value.items()})
    OmegaConf.update(tree, key, added, merge=bool(value))
    return None


def _as_meant(key: str, kind: Any, value: Any) -> str:
    """``: `` and how ``value`` is written so that it is of ``kind``, if that is clear; else empty."""
    if kind == list[str] and isinstance(value, (str, int, float)):
        return f": {key}=[{value}]"
    number = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([KMBGT])", str(value), re.IGNORECASE)
    if required(kind) is not int or not number:
        return ""
    power = {"K": 3, "M": 6, "B": 9, "G": 9, "T": 12}[number[2].upper()]
    return f": {round(Decimal(number[1]) * 10**power)}, or {number[1]}e{power}"


def _unresolved(error: OmegaConfBaseException) -> str:
    """Why a value's ${...} cannot be replaced."""
    reason = str(error).splitlines()[0]
    if not isinstance(error, InterpolationKeyError):
        return reason
    return f"{reason}: ${{...}} inserts another setting, such as ${{name}}; environment variables are expanded only in job.setup"


def literal(value: Any) -> Any:
    """``value`` with ${...} escaped: it is meant for a shell or another program, not for omegaconf. Tuples become lists."""
    if isinstance(value, dict):
        return {name: literal(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [literal(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _storable(text: str) -> bool:
    return not re.search("[\0\ud800-\udfff]", text)  # NUL bytes and lone surrogates


def shown_setting(key: str, value: Any) -> str:
    """A setting and its value for a message; without a value that is for other programs, and so may be a secret."""
    return key if key.startswith(("job.env", "job.options")) else f"{key}={shown(value)}"


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
