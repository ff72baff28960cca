"""Parse a file or a command line into settings: dotted keys, each with its text and its place."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple, get_origin

import yaml

from hpclm.config import reading
from hpclm.config.fields import as_yaml, required, type_of
from hpclm.config.job import JobConfig
from hpclm.config.sbatch import OPTIONS
from hpclm.config.typed import opened, shown_setting

RENAMED = {
    "job.name": "job.options.job-name",
    **{
        f"job.{option.name.replace('-', '_')}": option.key
        for option in OPTIONS.values()
        if not (option.instead or option.flag or hasattr(JobConfig, option.name))
    },
}
"""Short forms of options of sbatch: job.account for job.options.account."""
YAML_TEXT = "engine.extra"
"""A setting that maps dotted keys to YAML text."""


class Setting(NamedTuple):
    """A value for a dotted key; for a mapping such as job.env, the value of one name in it."""

    key: str
    node: yaml.Node
    at: yaml.Node
    """The key in its file."""
    name: str
    """The key as the user wrote it."""


class UnplacedWord(str):
    """A key=value word from a program. It has no place on a command line that a message could name."""


def is_override(word: str) -> bool:
    """Whether a command-line word is key=value rather than a file name."""
    return re.match(r"[A-Za-z_][\w.-]*\s*=", word) is not None


def of_words(words: Sequence[str], problems: list[str]) -> list[Setting]:
    """The settings of key=value words; ``problems`` gets a sentence for each invalid word."""
    settings: list[Setting] = []
    for word in words:
        name, sign, text = word.partition("=")
        at = reading.scalar(name.strip(), "" if isinstance(word, UnplacedWord) else reading.COMMAND_LINE)
        if not sign:
            problems.append(f"{word!r} is not key=value")
            continue
        try:
            node, wrong = _of_word(at.value, text, at.start_mark)
        except yaml.YAMLError as error:
            shown = shown_setting(at.value, text)
            reason = f": {reading.reason(error)}" if shown != at.value else ""  # the reason may quote a secret
            problems.append(f"{shown} is not a YAML value{reason}{reading.where(at)}")
            continue
        of_word = _ordered(_flat(at.value, at, node))
        problems += [*(f"{at.value}: {problem}" for problem in wrong), *_repeated(of_word)]
        settings += of_word
    return settings


def _of_word(name: str, text: str, mark: yaml.Mark) -> tuple[yaml.Node, list[str]]:
    """The value of a word, verbatim for a setting of text, else YAML; and the problems with the YAML."""
    kind = type_of(RENAMED.get(name, name))
    if required(kind) is str:
        return reading.scalar(text, mark, quoted=kind is str), []
    return reading.nodes(text, mark.name)


def of_file(content: reading.Content, problems: list[str]) -> list[Setting]:
    """The settings of a file; ``problems`` gets a sentence for each mistake in the YAML."""
    settings = _ordered(setting for at, node in content.root.value for setting in _flat(at.value, at, node))
    problems += [*content.problems, *_repeated(settings)]
    return settings


def _flat(name: str, at: yaml.Node, node: yaml.Node) -> Iterator[Setting]:
    """The settings in a value: one for each name of a mapping. An empty mapping is one setting, which empties the field."""
    key = RENAMED.get(name, name)
    kind: Any = type_of(key)
    is_section = kind is None or is_dataclass(kind)
    is_yaml = key.startswith(f"{YAML_TEXT}.")
    has_names = is_section or is_yaml or get_origin(required(kind)) is dict
    if has_names:
        node = opened(node)
    if has_names and isinstance(node, yaml.MappingNode) and (node.value or is_dataclass(kind)):
        for inner, value in node.value:
            yield from _flat(f"{name}.{inner.value}", inner, value)
    elif is_yaml:
        if not isinstance(node, yaml.ScalarNode):
            node = reading.scalar(as_yaml(reading.plain(node)), node.start_mark)
        yield Setting(key, reading.scalar(node.value, node.start_mark, quoted=True), at, name)
    elif key == name or not reading.is_null(node):
        yield Setting(key, node, at, name)


def _ordered(settings: Iterable[Setting]) -> list[Setting]:
    """The settings, with short forms of job.options last: a setting before them may empty the mapping."""
    return sorted(settings, key=lambda setting: setting.key != setting.name)


def _repeated(settings: Iterable[Setting]) -> Iterator[str]:
    """A problem for every setting that is set twice, such as model.layers beside model: {layers: ...}."""
    before: dict[str, Setting] = {}
    for setting in settings:
        first = before.get(setting.key)
        before[setting.key] = setting
        if first is None:
            continue
        names = ""
        if setting.key != setting.name:
            names = "," + " and".join(f" as {name}" for name in dict.fromkeys((first.name, setting.name)))
        file = setting.at.start_mark.name
        lines = reading.in_lines(*sorted((first.at, setting.at), key=reading.line))
        yield f"{setting.key} is set twice{names}{lines}; leave one out{f' ({file})' if file else ''}"
