"""A section of settings: its fields are declared by setting(), and rules say which values contradict each other.

Everything is reported at once. A rule that reads a refused setting is skipped, because it would only repeat the problem.
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
from hpclm.config.checks import RefusedError, named, typed, value_at
from hpclm.config.setting import Condition, declared

S = TypeVar("S", bound="Section")
_KEY = re.compile(r"\{([a-z][\w.]*)\}")


class Rule(NamedTuple):
    """A contradiction between settings. Both functions get the section."""

    broken: Callable[[Any], Any]
    """Whether the settings contradict each other; without a sentence, the problems."""
    sentence: str | Callable[[Any], str | Iterable[str]] | None = None
    """The problem and what to do; in a text {model.layers} becomes model.layers=12."""


class Section:
    """The base class of all sections. The constructor raises ConfigError for invalid values."""

    key: ClassVar[str] = ""
    """Its name; empty for the whole of the settings."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Contradictions, which are refused."""
    warnings: ClassVar[tuple[Rule, ...]] = ()
    """Settings without effect, which are only worth a warning."""

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
        section, problems = build(cls, values, ())
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
    """Every setting of ``section`` and of the sections inside it by its key there, such as attention.heads, with its value."""
    for key, _ in all_fields(type(section)):
        yield key, attrgetter(key)(section)


def all_sections(kind: Any, key: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The dotted key and the class of every section inside a section."""
    for entry in fields(kind):
        if is_dataclass(entry.type):
            yield dotted(key, entry.name), entry.type  # type: ignore[misc]
            yield from all_sections(entry.type, dotted(key, entry.name))


def build(kind: type[S], values: Mapping[str, Any], refused: Collection[str]) -> tuple[S, list[str]]:
    """A section with these values, and defaults for the rest, and its problems. A section with problems must not be used.

    ``values``: by dotted key. ``refused``: the dotted keys with an unreadable value.
    """
    attributes, problems = dict[str, Any](), list[str]()
    for entry in fields(kind):  # type: ignore[arg-type]
        key = dotted(kind.key, entry.name)
        if is_dataclass(entry.type):
            attributes[entry.name], wrong = build(entry.type, values, refused)  # type: ignore[type-var, arg-type]
            problems += wrong
        else:
            attributes[entry.name] = values[key] if key in values else default_of(entry)
    section = object.__new__(kind)
    section.__dict__.update(attributes)
    section, wrong = examined(_without(section, {name for name in attributes if dotted(kind.key, name) in refused}))
    return section, problems + wrong


def examined(section: S) -> tuple[S, list[str]]:
    """The section without the settings that are refused, for rules of a larger section, and everything that is wrong with it."""
    problems, refused = list[str](), set[str]()
    for entry in fields(section):  # type: ignore[arg-type]
        if is_dataclass(entry.type):
            continue
        try:
            value = getattr(section, entry.name)
        except RefusedError:
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
        except RefusedError:
            continue


def warnings(section: Section) -> Iterator[str]:
    """Settings of ``section``, and of the sections inside it, that have no effect because of others, and may be meant so."""
    yield from _idle(section, _unmet(section, warn=True), warn=True)
    for key, kind in all_sections(type(section)):
        yield from broken(attrgetter(key)(section), kind.warnings)
    yield from broken(section, section.warnings)


def _unmet(section: Section, warn: bool) -> dict[Condition, dict[str, Field]]:
    """The conditions that do not hold, each with the settings that are not at their defaults and have no effect without it."""
    kind: Any = type(section)
    unmet: dict[Condition, dict[str, Field]] = {}
    for key, entry, condition in _conditions(kind, warn):
        with suppress(RefusedError):
            changed = value_at(section, key) != default_of(entry)
            if changed and not condition.holds(value_at(section, condition.key)):
                unmet.setdefault(condition, {})[key] = entry
    return unmet


@cache
def _conditions(kind: Any, warn: bool) -> list[tuple[str, Field, Condition]]:
    """The conditions between settings of a section; for warnings, also those inside its sections."""
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
        words = [named(section, key) for key in settings]
        sentence = f"{no_effect(words)} {condition.unmet(value_at(section, condition.key), several)}"
        defaults = " ".join(f"{key}={shlex.quote(typed(default_of(entry)))}" for key, entry in settings.items())
        yield sentence if warn else f"{sentence}. Leave {'them' if several else 'it'} out, or set {defaults}"


def given(section: Any, *keys: str) -> list[str]:
    """The ones of these settings that differ from their defaults, as they are typed."""
    changed = [key for key in keys if value_at(section, key.rpartition(".")[0]).changed(key.rpartition(".")[2])]
    return [named(section, key) for key in changed]


def no_effect(words: Sequence[str]) -> str:
    """That settings have no effect."""
    return f"{', '.join(words)} {'have' if len(words) > 1 else 'has'} no effect"


def _common(key: str, other: str) -> str:
    """The smallest section that has both settings."""
    common = []
    for mine, theirs in zip(key.split(".")[:-1], other.split(".")[:-1], strict=False):
        if mine != theirs:
            break
        common.append(mine)
    return ".".join(common)


def _wrong(key: str, entry: Field, value: Any) -> list[str]:
    """Problems with the value of one setting."""
    declaration = declared(entry)
    if declaration.names is not None and value is not None:
        names = value if isinstance(value, list) else [value]
        return [wrong for name in names if (wrong := problem(key, name, declaration.names))]
    wrong = declaration.problem(value)
    return [f"{key}={typed(value)} {wrong}"] if wrong else []


def _sentences(facts: Any, rule: Rule) -> list[str]:
    """The sentences of one rule if it is broken."""
    wrong = rule.broken(facts)
    if rule.sentence is None:
        return list(wrong)
    if not wrong:
        return []
    if isinstance(rule.sentence, str):
        return [_KEY.sub(lambda match: named(facts, match[1]), rule.sentence)]
    sentences = rule.sentence(facts)
    return [sentences] if isinstance(sentences, str) else list(sentences)


def _without(section: Any, refused: Collection[str]) -> Any:
    """The section with settings that raise RefusedError when they are read; their keys begin inside the section."""
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
    raise RefusedError
