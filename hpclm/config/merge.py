"""Merge settings into one RunConfig, collecting every problem. The only file that imports omegaconf."""

import re
import shlex
import sys
import typing
import unicodedata
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, OmegaConfBaseException

from hpclm import paths
from hpclm.config import hints, reading
from hpclm.config.checks import MAX_INTEGER, shown, texts
from hpclm.config.fields import (
    as_word,
    flattened,
    keys,
    path_separator,
    required,
    split_key,
    type_of,
    type_text,
)
from hpclm.config.schema import RunConfig
from hpclm.config.setting import declared
from hpclm.errors import ConfigError
from hpclm.registry import hint

EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")


class Setting(NamedTuple):
    """A value for a dotted key, and where it was given."""

    key: str
    value: Any
    origin: str
    line: int | None = None
    """Of the file that it was given in."""
    typed: str = ""
    """Its name there, if it has another."""


def merge(settings: list[Setting], problems: list[str]) -> RunConfig:
    """The defaults with all ``settings`` in their order; ConfigError with ``problems`` and everything else that is wrong."""
    tree = OmegaConf.structured(RunConfig)
    sections = [field.name for field in fields(RunConfig) if is_dataclass(field.type)]
    for node in [tree, *(tree[name] for name in sections)]:
        OmegaConf.set_readonly(node, False)
    refused = []
    for setting in settings:
        try:
            _set(tree, setting.key, setting.value)
        except ConfigError as error:
            typed = f"{setting.typed} in the " if setting.typed and setting.origin == "command line" else ""
            typed = typed or (f"{setting.typed} in " if setting.typed else "")
            problems.append(f"{error} ({typed}{setting.origin})")
            refused += [setting.key] if type_of(setting.key) else []
    parts: dict[str, Any] = {}
    for field in fields(RunConfig):
        try:
            if field.name in sections:
                section = OmegaConf.to_object(tree[field.name])
                parts[field.name] = _with_homes(section, f"{field.name}.", problems)
            else:
                home = declared(field).path == "" and tree[field.name]
                parts[field.name] = paths.with_home(tree[field.name]) if home else tree[field.name]
        except ConfigError as error:
            problems += error.problems if field.name in sections else [f"{field.name}={error}"]
        except OmegaConfBaseException as error:
            problems.append(f"{field.name}: {_unresolved(error)}")
    try:
        run = RunConfig(**parts)
    except ConfigError as error:  # without problems that only follow from a setting reported above
        problems += [p for p in error.problems if p not in problems and not any(key in p for key in refused)]
    if problems:
        raise ConfigError(problems)
    return run


def _set(tree: Any, key: str, value: Any) -> None:
    """Set one setting; ConfigError if it does not exist or does not take this value."""
    kind = type_of(key)
    if kind is None:
        raise ConfigError(_unknown(key))
    if key == "data" and isinstance(value, str):
        raise ConfigError(
            f"data={shown(value)} must be a section, such as {{prefix: DATASET}}; a text, or the prefix of a dataset, is given on the "
            "command line of hpclm train or hpclm submit as data=…, or to hpclm.train and hpclm.submit in Python"
        )
    if is_dataclass(kind):
        raise ConfigError(f"{key} is a section; set its fields, such as {key}.{fields(kind)[0].name}=…")
    if any(re.search("[\0\ud800-\udfff]", text) for text in texts(value)):  # NUL bytes and lone surrogates
        encoding = sys.getfilesystemencoding()
        ways = (
            ""
            if encoding == "utf-8"
            else f": this process reads {encoding}, not UTF-8; export PYTHONUTF8=1 or LC_ALL=C.UTF-8"
        )
        raise ConfigError(f"{shown_setting(key, value)} contains a character that cannot be stored in a file{ways}")
    mapping, name = split_key(key)
    if typing.get_origin(type_of(mapping)) is dict:
        _add_to_mapping(tree, mapping, {name: value} if name else value)
        return
    before = OmegaConf.select(tree, key)
    try:
        OmegaConf.update(tree, key, _normal(key, kind, value), merge=False)
        OmegaConf.select(tree, key)  # resolves ${...}
    except ConfigError:
        raise
    except (OmegaConfBaseException, ValueError, OverflowError) as error:
        OmegaConf.update(tree, key, before, merge=False)
        if isinstance(error, InterpolationResolutionError):
            raise ConfigError(f"{key}={shown(value)}: {_unresolved(error)}") from None
        near = hint(
            "cuda" if value == "gpu" else str(value), [str(choice) for choice in typing.get_args(kind)]
        ) or _as_meant(key, kind, value)
        raise ConfigError(f"{key}={shown(value)} must be {type_text(kind)}{'.' * near.startswith(' ')}{near}") from None


def _unknown(key: str) -> str:
    if VARIABLE.fullmatch(key):
        return f"{key} is an environment variable, not a setting: export it where you start or submit the run"
    written = re.sub(r"[\s\u200b-\u200f\u2060\ufeff]", "", unicodedata.normalize("NFKC", key))
    if written != key and type_of(written) is not None:
        return f"unknown setting {key!a}: it has characters that only look like those of {written}; type it anew"
    return f"unknown setting {key}{hints.hint(key, keys())}"


def _normal(key: str, kind: Any, value: Any) -> Any:
    """``value`` as OmegaConf takes it: text as it was typed, 1e6 and 1_000_000 as integers, micro_size=auto as 0, ${...} of job.* as
    text.

    ConfigError for values that it would take, but that were hardly meant.
    """
    inner, expected = required(kind), type_text(kind)
    if value is None and inner is kind:
        raise ConfigError(f"{key} must be {expected}, not empty")
    if inner is str and isinstance(value, bool):
        raise ConfigError(f"{key} must be {expected}; {_as_a_word(value)}")
    if inner is bool and isinstance(value, (int, float)) and value not in (0, 1):
        raise ConfigError(f"{key}={shown(value)} must be {expected}")
    if key == "batch.micro_size" and value in (0, "auto") and value is not False:
        if value == 0:
            raise ConfigError(f"{key}=0 must be at least 1, or auto")
        return 0
    if inner == list[str] and isinstance(value, list):
        value = [_text(key, expected, part) for part in value]
    elif inner is str and isinstance(value, (int, float)):
        value = str(value)
    elif typing.get_origin(inner) is tuple and isinstance(value, list):
        value = [_number(part, typing.get_args(inner)[0]) for part in value]
    elif inner == list[dict[str, Any]] and isinstance(value, list):
        value = [_entry(entry) for entry in value]
    else:
        value = _number(value, inner)
    if any(
        isinstance(part, int) and abs(part) > MAX_INTEGER for part in (value if isinstance(value, list) else [value])
    ):
        raise ConfigError(f"{key}={shown(value)} must be {expected} of at most {MAX_INTEGER:,}")
    if path_separator(key) is not None:
        try:
            return _with_variables(value)
        except ConfigError as error:
            raise ConfigError(f"{key}={error}") from None
    return literal(value) if key.startswith("job.") else value


def _with_variables(value: Any) -> Any:
    """The paths of a setting, with environment variables, and with other settings for OmegaConf to insert."""
    if isinstance(value, list):
        return [_with_variables(part) for part in value]

    def is_for_omegaconf(inside: str) -> bool:
        return type_of(inside.strip()) is not None or not re.fullmatch(r"(oc\.env:)?\s*\w+\s*", inside)

    return paths.with_variables(value, is_for_omegaconf) if isinstance(value, str) else value


def _with_homes(section: Any, prefix: str, problems: list[str]) -> Any:
    """A section of settings with home folders in its paths; what is wrong with them is added to ``problems``."""
    changes = {}
    for field in fields(section):
        value, separator = getattr(section, field.name), declared(field).path
        if separator is not None and value and not (declared(field).url and "://" in value):
            try:
                changes[field.name] = _with_home(value, separator)
            except ConfigError as error:
                problems += [f"{prefix}{field.name}={problem}" for problem in error.problems]
    return replace(section, **{name: value for name, value in changes.items() if value != getattr(section, name)})


def _with_home(value: Any, separator: str) -> Any:
    if isinstance(value, list):
        return [_with_home(part, separator) for part in value]
    if not separator:
        return paths.with_home(value)
    return separator.join(paths.with_home(part) for part in value.split(separator))


def _as_a_word(value: bool | None) -> str:
    """What YAML makes of a word such as on, and the way out."""
    return f"YAML reads this word as {'null' if value is None else str(value).lower()}, so put quotes around it"


def _text(key: str, expected: str, part: Any) -> str:
    """An entry of a list of text, as it was typed; ConfigError if it is none."""
    if isinstance(part, bool) or part is None:
        raise ConfigError(f"{key} must be {expected}; {_as_a_word(part)}")
    if not isinstance(part, (str, int, float)):
        raise ConfigError(f"{key} must be {expected}, but one entry is {shown(reading.plain(part))}")
    return str(part)


def _number(value: Any, kind: Any) -> Any:
    """``value`` without how it was typed; as an integer where ``kind`` is one and it can be."""
    value = reading.plain(value)
    if kind is int and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        return _whole(value)
    return value


def _entry(entry: Any) -> Any:
    """An entry of optim.groups, whose ``match`` is text."""
    if not isinstance(entry, dict):
        return reading.plain(entry)
    typed_number = isinstance(entry.get("match"), (reading.TypedInt, reading.TypedFloat))
    return reading.plain({**entry, "match": str(entry["match"])} if typed_number else entry)


def _whole(value: float | str) -> Any:
    """``value`` as an integer if it is one; otherwise unchanged."""
    with suppress(ValueError):
        return int(value) if isinstance(value, (int, str)) else int(value) if value.is_integer() else value
    with suppress(ValueError):
        return int(float(value)) if float(value).is_integer() else value
    return value


def _add_to_mapping(tree: Any, key: str, value: Any) -> None:
    """Add entries to the mapping ``key``; {} empties it. ConfigError, without values, which may be secrets."""
    if not isinstance(value, dict):
        raise ConfigError(f"{shown_setting(key, value)} must be {type_text(type_of(key))}")
    if type_of(key) == dict[str, Any]:
        OmegaConf.update(
            tree, key, literal({str(name): _as_value(inner) for name, inner in value.items()}), merge=bool(value)
        )
        return
    if key == "engine.extra":
        value = {name: _yaml_as_typed(inner) for name, inner in flattened(value).items()}
    if key == "model.rope_scaling":  # a mapping of numbers
        value = reading.plain(value)
    for name, text in value.items():
        if text is None and ":" in str(name):  # {NAME:value} is one name
            before = str(name).partition(":")[0]
            raise ConfigError(f"{key} has no space after the ':' of {before}, which YAML needs (value not shown)")
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            raise ConfigError(f"{shown_setting(f'{key}.{name}', text)} must be text; put quotes around it")
    added = literal({str(name): str(text) for name, text in value.items()})
    OmegaConf.update(tree, key, added, merge=bool(value))


def _as_value(value: Any) -> Any:
    """A value in Python's types; 1e-8, which is text in YAML, is a number."""
    value = reading.plain(value)
    if isinstance(value, dict):
        return {name: _as_value(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_value(inner) for inner in value]
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def _yaml_as_typed(value: Any) -> str:
    """A value of engine.extra, which is YAML, as it was typed."""
    return (
        str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else as_word(reading.plain(value))
    )


def _as_meant(key: str, kind: Any, value: Any) -> str:
    """``: `` and how ``value`` is written so that it is of ``kind``, if that is clear; else empty."""
    if kind == list[str] and isinstance(value, (str, int, float)):
        return f": {shlex.quote(f'{key}=[{value}]')}"
    if typing.get_origin(required(kind)) is tuple and isinstance(value, list):
        of_numbers = typing.get_args(required(kind))[0]
        return next(filter(None, (_as_meant(key, of_numbers, part) for part in value)), "")
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
    return f"{reason}: ${{...}} inserts another setting, such as ${{name}}; environment variables are expanded in paths and in job.setup"


def literal(value: Any) -> Any:
    """``value`` with ${...} escaped: it is meant for a shell or another program, not for omegaconf. Tuples become lists."""
    if isinstance(value, dict):
        return {name: literal(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [literal(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def shown_setting(key: str, value: Any) -> str:
    """A setting and its value for a message; without a value that is for other programs, and so may be a secret."""
    return key if key.startswith(("job.env", "job.options")) else f"{key}={shown(value)}"
