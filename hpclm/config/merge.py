"""Merge settings into one RunConfig, collecting every problem. The only file that imports omegaconf."""

import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, get_origin

from omegaconf import Container, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationKeyError, OmegaConfBaseException

from hpclm.base import paths
from hpclm.base.errors import ConfigError
from hpclm.config import hints
from hpclm.config.checks import mapped_texts, shown, texts
from hpclm.config.fields import declaration_of, keys, nested, path_separator, required, split_key, type_of
from hpclm.config.optim import Group
from hpclm.config.reading import is_null, node, plain, scalar, where, with_texts
from hpclm.config.schema import RunConfig
from hpclm.config.section import build_section, leaves
from hpclm.config.settings import Setting
from hpclm.config.typed import shown_setting, typed

VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
DEFAULT_OUT = Setting("out", scalar(RunConfig.out, quoted=True), scalar("out"), "out")
"""The only default that refers to another setting."""


def merge(settings: Sequence[Setting], problems: list[str], base: RunConfig | None = None) -> RunConfig:
    """``base``, or the defaults, overridden by ``settings`` in their order; ConfigError with ``problems`` and all further ones."""
    values = dict(leaves(base or RunConfig()))
    refused: set[str] = set()
    references: dict[str, Setting] = {}
    for setting in settings:
        field, name = split_key(setting.key)
        with _collected(field, problems, refused):
            setting = _checked(setting)
            references.pop(setting.key, None)
            if inserts_settings(field) and _has_reference(plain(setting.node)):
                references[setting.key] = _with_reference(setting)
                continue
            value = _value(setting)
            if name is not None:
                value = {**values[field], name: value}
            values[field] = value
    if base is None and all(setting.key != "out" for setting in settings):
        references["out"] = DEFAULT_OUT
    tree = _tree(values, {key: plain(setting.node) for key, setting in references.items()})
    for key, setting in references.items():
        if setting is DEFAULT_OUT and problems:  # it would repeat a problem of the name
            continue
        with _collected(key, problems, refused):
            values[key] = _value(_resolved(setting, tree))
    run, wrong = build_section(RunConfig, values, refused)
    problems += wrong
    if problems:
        raise ConfigError(problems)
    return run


@contextmanager
def _collected(key: str, problems: list[str], refused: set[str]) -> Iterator[None]:
    """If the block raises ConfigError, add its problems to ``problems`` and ``key`` to ``refused``."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
        refused.add(key)


def inserts_settings(key: str) -> bool:
    """Whether ${NAME} in the value of ``key`` inserts another setting. Values for a shell or another program stay verbatim."""
    kind = required(type_of(key))
    of_program = key.startswith("job.") or get_origin(kind) is dict or kind == list[Group]
    return path_separator(key) is not None or not of_program


def literal(value: Any) -> Any:
    """``value``, if it is text or a list of text, with ${...} escaped; any other value unchanged."""
    if isinstance(value, (list, tuple)):
        return [literal(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)


def _checked(setting: Setting) -> Setting:
    """The setting with environment variables in paths expanded; ConfigError if the setting or the variable does not exist."""
    wrong = _wrong(setting, type_of(setting.key), plain(setting.node))
    if wrong:
        raise ConfigError(f"{wrong}{where(setting.at)}")
    if path_separator(setting.key) is None:
        return setting

    def is_for_omegaconf(inside: str) -> bool:
        return type_of(inside.strip()) is not None or not re.fullmatch(r"(oc\.env:)?\s*\w+\s*", inside)

    try:
        return setting._replace(
            node=with_texts(setting.node, lambda text: paths.with_variables(text, is_for_omegaconf))
        )
    except ConfigError as error:
        raise ConfigError(f"{setting.name}={error}{where(setting.at)}") from None


def _wrong(setting: Setting, kind: Any, value: Any) -> str:
    key = setting.name
    if kind is None:
        return _unknown(key)
    if key == "data" and isinstance(value, str):
        return (
            f"data={shown(value)} must be a section, such as {{prefix: DATASET}}; a text, or the prefix of a dataset, is given on the "
            "command line of hpclm train or hpclm submit as data=…, or to hpclm.train and hpclm.submit in Python"
        )
    if is_dataclass(kind):
        return f"{key} is a section; set its fields, such as {key}.{fields(kind)[0].name}=…"
    mapping, name = split_key(key)
    if name and ":" in name and is_null(setting.node):  # {NAME:value} is one name
        return f"{mapping} has no space after the ':' of {name.partition(':')[0]}, which YAML needs (value not shown)"
    if any(re.search("[\0\ud800-\udfff]", text) for text in texts({key: value})):  # NUL bytes and lone surrogates
        problem = f"{shown_setting(key, value)} contains a character that cannot be stored in a file"
        encoding = sys.getfilesystemencoding()
        if encoding != "utf-8":
            problem += f": this process reads {encoding}, not UTF-8; export PYTHONUTF8=1 or LC_ALL=C.UTF-8"
        return problem
    if key == "batch.micro_size" and value == 0:
        return "batch.micro_size=0 must be at least 1, or auto"
    return ""


def _unknown(key: str) -> str:
    if VARIABLE.fullmatch(key):
        return f"{key} is an environment variable, not a setting: export it where you start or submit the run"
    written = re.sub(r"[\s\u200b-\u200f\u2060\ufeff]", "", unicodedata.normalize("NFKC", key))
    if written != key and type_of(written) is not None:
        return f"unknown setting {key!a}: it has characters that only look like those of {written}; type it anew"
    return f"unknown setting {key}{hints.hint(key, keys())}"


def _value(setting: Setting) -> Any:
    """The value of a setting in its declared type, with ~ in paths expanded."""
    if setting.key == "batch.micro_size" and plain(setting.node) == "auto":
        return 0
    value = typed(setting.name, setting.node, type_of(setting.key))
    declaration = declaration_of(setting.key)
    if not value or declaration is None or declaration.path is None or (declaration.url and "://" in value):
        return value
    try:
        return mapped_texts(value, lambda text: _with_home(text, declaration.path or ""))
    except ConfigError as error:
        raise ConfigError(f"{setting.name}={problem}{where(setting.at)}" for problem in error.problems) from None


def _with_home(text: str, separator: str) -> str:
    if not separator:
        return paths.with_home(text)
    return separator.join(map(paths.with_home, text.split(separator)))


def _tree(values: dict[str, Any], references: dict[str, Any]) -> Any:
    """The settings that references can insert. Text for other programs that looks like a reference is left out."""
    tree = {key: literal(value) for key, value in values.items() if inserts_settings(key) or not _has_reference(value)}
    return OmegaConf.create(nested(tree | references), flags={"allow_objects": True})


def _has_reference(value: Any) -> bool:
    return any("${" in text for text in texts(value))


def _with_reference(setting: Setting) -> Setting:
    """The setting with every value in it as text; ConfigError if a ${ is not closed."""
    setting = setting._replace(node=with_texts(setting.node))
    with _resolving(setting):
        OmegaConf.create([plain(setting.node)])
    return setting


def _resolved(setting: Setting, tree: Any) -> Setting:
    """The setting with values in place of references; ConfigError for an unknown name."""
    with _resolving(setting):
        value = OmegaConf.select(tree, setting.key, throw_on_missing=True)
        if isinstance(value, Container):
            value = OmegaConf.to_container(value, resolve=True)
    return setting._replace(node=node(value, setting.node.start_mark))


@contextmanager
def _resolving(setting: Setting) -> Iterator[None]:
    """ConfigError if the block cannot replace ${...} in a setting."""
    try:
        yield
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, GrammarParseError):
            reason = "${...} is not complete; write \\${ for these characters"
        if isinstance(error, InterpolationKeyError):
            reason += ": ${...} inserts another setting, such as ${name}; environment variables are expanded in paths and in job.setup"
        raise ConfigError(f"{shown_setting(setting.name, plain(setting.node))}: {reason}{where(setting.at)}") from None
