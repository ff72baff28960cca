"""A section of settings: setting() declares its fields, and rules define contradictions between their values.

All problems are reported at once. A rule that reads a refused setting is skipped, because it would only repeat the problem.
"""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from hpclm.base.errors import ConfigError
from hpclm.base.registry import problem
from hpclm.config.checks import RefusedSettingError, as_list, assignment, typed, value_at
from hpclm.config.setting import Condition, declared

S = TypeVar("S", bound="Section")
_KEY = re.compile(r"\{([a-z][\w.]*)\}")


class Rule(NamedTuple):
    """A contradiction between settings. Both functions take the section."""

    broken: Callable[[Any], Any]
    """Returns whether the settings contradict each other; without ``sentence``, returns the problems."""
    sentence: str | Callable[[Any], str | list[str]] | None = None
    """The problem and the way out. In a text, {model.layers} becomes model.layers=12."""


class Section:
    """The base class of all sections. The constructor raises ConfigError for invalid values."""

    key: ClassVar[str] = ""
    """The section's dotted key; empty for RunConfig, which contains all settings."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Contradictions, which are refused."""
    warnings: ClassVar[tuple[Rule, ...]] = ()
    """Settings without effect, which the user may intend."""

    def __init_subclass__(cls, key: str | None = None) -> None:
        if key is not None:
            cls.key = key

    def __post_init__(self) -> None:
        _, problems = examined(self)
        if problems:
            raise ConfigError(problems)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The section with these settings, such as {"layers": 2, "attention.heads": 4}, and defaults for the rest."""
        values = {dotted(cls.key, name): value for name, value in settings.items()}
        if unknown := values.keys() - dict(all_fields(cls, cls.key)).keys():
            raise ConfigError([f"{key} is not a setting" for key in sorted(unknown)])
        section, problems = build_section(cls, values, ())
        if problems:
            raise ConfigError(problems)
        return section

    def replaced(self, settings: Mapping[str, Any]) -> Self:
        """The section with other values of these settings, such as {"attention.heads": 4}."""
        return self.of({**dict(leaves(self)), **settings})

    def __dir__(self) -> list[str]:
        """The names that completion shows: the settings."""
        return list(getattr(self, "__dataclass_fields__", ()))

    def changed(self, name: str) -> bool:
        """Whether a setting differs from its default."""
        return bool(getattr(self, name) != default_of(self.__dataclass_fields__[name]))  # type: ignore[attr-defined]


def default_of(entry: Field) -> Any:
    """The default of a field."""
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def dotted(section: str, name: str) -> str:
    """The key of a setting of a section."""
    return f"{section}.{name}" if section else name


def all_fields(kind: Any, key: str = "") -> Iterator[tuple[str, Field]]:
    """The dotted key and the field of every setting of a section, and of the sections inside it."""
    for entry in fields(kind):
        name = dotted(key, entry.name)
        if is_dataclass(entry.type):
            yield from all_fields(entry.type, name)
        else:
            yield name, entry


def leaves(section: Any) -> Iterator[tuple[str, Any]]:
    """The key, relative to ``section`` (attention.heads), and the value of every setting in ``section`` and its inner sections."""
    for key, _ in all_fields(type(section)):
        yield key, attrgetter(key)(section)


def all_sections(kind: Any, key: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The dotted key and the class of every section inside a section."""
    for entry in fields(kind):
        if is_dataclass(entry.type):
            yield dotted(key, entry.name), entry.type  # type: ignore[misc]
            yield from all_sections(entry.type, dotted(key, entry.name))


def build_section(kind: type[S], values: Mapping[str, Any], refused: Collection[str]) -> tuple[S, list[str]]:
    """A section with these values, and defaults for the rest; and its problems. A section with problems must not be used.

    ``values``: by dotted key. ``refused``: the dotted keys with an unreadable value.
    """
    attributes: dict[str, Any] = {}
    problems: list[str] = []
    for entry in fields(kind):  # type: ignore[arg-type]
        key = dotted(kind.key, entry.name)
        if is_dataclass(entry.type):
            attributes[entry.name], wrong = build_section(entry.type, values, refused)  # type: ignore[type-var, arg-type]
            problems += wrong
        else:
            attributes[entry.name] = values.get(key, default_of(entry))
    section = object.__new__(kind)
    section.__dict__.update(attributes)
    section, wrong = examined(_without(section, {name for name in attributes if dotted(kind.key, name) in refused}))
    return section, problems + wrong


def examined(section: S) -> tuple[S, list[str]]:
    """The section without its refused settings, for the rules of a larger section; and all problems of the section."""
    problems: list[str] = []
    refused: set[str] = set()
    for entry in fields(section):  # type: ignore[arg-type]
        if is_dataclass(entry.type):
            continue
        try:
            value = getattr(section, entry.name)
        except RefusedSettingError:
            continue
        if wrong := _wrong(dotted(section.key, entry.name), entry, value):
            problems += wrong
            refused.add(entry.name)
    section = _without(section, refused)
    unmet = _unmet(section, warn=False)
    problems += _idle(section, unmet, warn=False)
    without_effect = {key.removeprefix(f"{section.key}.") for settings in unmet.values() for key in settings}
    problems += broken(section, section.rules)
    return _without(section, without_effect), problems


def problems_of(call: Callable[..., Any], *arguments: Any) -> list[str]:
    """The problems of the ConfigError that a call raises; empty if it raises none."""
    try:
        call(*arguments)
    except ConfigError as error:
        return error.problems
    return []


def broken(facts: Any, rules: Iterable[Rule]) -> Iterator[str]:
    """The sentences of the rules that are broken."""
    for rule in rules:
        try:
            yield from _sentences(facts, rule)
        except RefusedSettingError:
            continue


def warnings(section: Section) -> Iterator[str]:
    """Settings of ``section`` and its inner sections that have no effect because of other settings, which the user may intend."""
    yield from _idle(section, _unmet(section, warn=True), warn=True)
    for key, kind in all_sections(type(section)):
        yield from broken(attrgetter(key)(section), kind.warnings)
    yield from broken(section, section.warnings)


def _unmet(section: Section, warn: bool) -> dict[Condition, dict[str, Field]]:
    """The conditions that do not hold, each with the settings that differ from their defaults and have no effect without it."""
    kind: Any = type(section)
    unmet: dict[Condition, dict[str, Field]] = {}
    for key, entry, condition in _conditions(kind, warn):
        with suppress(RefusedSettingError):
            changed = value_at(section, key) != default_of(entry)
            if changed and not condition.holds(value_at(section, condition.key)):
                unmet.setdefault(condition, {})[key] = entry
    return unmet


@cache
def _conditions(kind: Any, warn: bool) -> list[tuple[str, Field, Condition]]:
    """The conditions between settings of a section; for warnings, also the conditions inside its inner sections."""
    return [
        (key, entry, condition)
        for key, entry in all_fields(kind, kind.key)
        for condition in (declared(entry).warn_without if warn else declared(entry).only_with)
        if warn or _common(key, condition.key) == kind.key
    ]


def _idle(section: Section, unmet: Mapping[Condition, Mapping[str, Field]], warn: bool) -> Iterator[str]:
    """A sentence for each condition that does not hold."""
    for condition, settings in unmet.items():
        several = len(settings) > 1
        words = [assignment(section, key) for key in settings]
        sentence = f"{no_effect(words)} {condition.unmet(value_at(section, condition.key), several)}"
        defaults = " ".join(f"{key}={shlex.quote(typed(default_of(entry)))}" for key, entry in settings.items())
        if not warn:
            sentence += f". Leave {'them' if several else 'it'} out, or set {defaults}"
        yield sentence


def given(section: Any, *keys: str) -> list[str]:
    """The settings among ``keys`` that differ from their defaults, as key=value."""
    changed = [key for key in keys if value_at(section, key.rpartition(".")[0]).changed(key.rpartition(".")[2])]
    return [assignment(section, key) for key in changed]


def no_effect(words: Sequence[str]) -> str:
    """The beginning of a message that settings have no effect."""
    return f"{', '.join(words)} {'have' if len(words) > 1 else 'has'} no effect"


def _common(key: str, other: str) -> str:
    common = []
    for mine, theirs in zip(key.split(".")[:-1], other.split(".")[:-1], strict=False):
        if mine != theirs:
            break
        common.append(mine)
    return ".".join(common)


def _wrong(key: str, entry: Field, value: Any) -> list[str]:
    declaration = declared(entry)
    if declaration.names is not None and value is not None:
        return list(filter(None, (problem(key, name, declaration.names) for name in as_list(value))))
    wrong = declaration.problem(value)
    return [f"{key}={typed(value)} {wrong}"] if wrong else []


def _sentences(facts: Any, rule: Rule) -> list[str]:
    wrong = rule.broken(facts)
    if rule.sentence is None:
        return list(wrong)
    if not wrong:
        return []
    if isinstance(rule.sentence, str):
        return [_KEY.sub(lambda match: assignment(facts, match[1]), rule.sentence)]
    return as_list(rule.sentence(facts))


def _without(section: Any, refused: Collection[str]) -> Any:
    """The section, where reading a setting of ``refused`` raises RefusedSettingError. ``refused``: keys relative to the section."""
    if not refused:
        return section
    here = {key for key in refused if "." not in key}
    kind = type(type(section).__name__, (type(section),), dict.fromkeys(here, property(_refuse)))
    partial: Any = object.__new__(kind)
    partial.__dict__.update({name: value for name, value in vars(section).items() if name not in here})
    inside = {key.partition(".")[0] for key in refused if "." in key}
    for name in inside:
        keys = {key.removeprefix(f"{name}.") for key in refused if key.startswith(f"{name}.")}
        partial.__dict__[name] = _without(getattr(section, name), keys)
    return partial


def _refuse(section: Any) -> Any:
    raise RefusedSettingError
