"""Declare a setting once: default, documentation, range, unit, whether it is a path, and the settings that it depends on.

    layers: int = setting(12, "Transformer blocks.", at_least=1, at_most=10_000)
    folder: str | None = setting(None, "Folder for indices.", path=True, only_with="data.source=indexed|own")

Checks, their messages, --help, docs/settings.md, ``hpclm docs`` and completion all read the declaration.
"""

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from functools import partial
from typing import Any

from hpclm.base.registry import OWN
from hpclm.config.checks import typed

_KEY = "declared"
_FORM = re.compile(r"(not )?([a-z][\w.]*)(?:(=|!=|>)([^:]+))?(?:: (.+))?")
OWN_CODE = "own"


@dataclass(frozen=True)
class Condition:
    """A condition on another setting, without which a setting has no effect.

    =============================================  =====================================================
    parallel.pipeline>1                            a number above 1
    optim.schedule=wsd|fairseq_cosine|own          one of these values; own: any package.module:Name
    data.source!=synthetic                         any value but this one
    log.sinks                                      a value: not null, 0, false, none or empty
    not job.container                              no value
    engine.device!=cpu: it chooses GPU kernels     with a reason, for messages
    =============================================  =====================================================
    """

    key: str
    sign: str
    values: tuple[str, ...]
    reason: str

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """The condition that ``text`` states."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a condition")
        absent, key, sign, values, reason = match.groups(default="")
        return cls(key, absent.strip() or sign, tuple(filter(None, values.split("|"))), reason)

    def holds(self, value: Any) -> bool:
        """Whether the condition holds if its setting has this value."""
        text = typed(value)
        absent = value in (None, 0, False, "", "none", [], {})
        match self.sign:
            case "":
                return not absent
            case "not":
                return absent
            case ">":
                return bool(value > float(self.values[0]))
            case "!=":
                return text not in self.values
        return text in self.values or (OWN_CODE in self.values and OWN.fullmatch(text) is not None)

    def unmet(self, value: Any, several: bool = False) -> str:
        """The end of "X has no effect …" for this value; ``several``: whether X is more than one setting."""
        unset = not self.sign and value in (None, "", [], {})
        text = f"without {self.key}" if unset else f"with {self.key}={typed(value)}"
        if self.reason:
            return f"{text}: {self.reason}"
        if self.sign != "=":
            return text
        names = ", ".join(name for name in self.values if name != OWN_CODE)
        return f"{text}; {'they apply' if several else 'it applies'} to {names}"

    def __str__(self) -> str:
        if self.sign == "not":
            return f"without {self.key}"
        if self.sign == "!=":
            return f"without {self.key}={self.values[0]}"
        names = " or ".join("your own" if name == OWN_CODE else name for name in self.values)
        return f"with {self.key}{self.sign}{names}"


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The declaration of a setting, without its type and its default."""

    doc: str
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    auto: Any = None
    """The value that "auto" is stored as; None if the setting cannot be auto."""
    infinite: bool = False
    """Whether inf is allowed. NaN is always refused."""
    unit: str = ""
    """A plural, such as steps."""
    path: str | None = None
    """The text that separates paths in a value; empty for a single path, None if the value is not a path."""
    url: bool = False
    """Whether a URL is allowed in place of a path."""
    runs_code: bool = False
    """Whether the value determines which programs run. It is then refused from a file that others could have written."""
    secret: bool = False
    """Whether messages must not show the value."""
    names: Mapping[str, Any] | None = None
    """The valid names besides package.module:Name; None if the value is not a name."""
    only_with: tuple[Condition, ...] = ()
    """Conditions. If any does not hold, a value other than the default has no effect and is refused."""
    warn_without: tuple[Condition, ...] = ()
    """Conditions. If any does not hold, a value other than the default has no effect and causes a warning."""
    advice: str = ""
    """The way out for a value outside the range."""

    @property
    def text(self) -> str:
        """The documentation, with the range and the conditions."""
        sentences = [self.doc]
        if self.limits:
            sentences.append(f"{self.limits[:1].upper()}{self.limits[1:]}.")
        conditions = " and ".join(map(str, self.only_with + self.warn_without))
        if conditions:
            sentences.append(f"Only {conditions}.")
        return " ".join(sentences)

    @property
    def limits(self) -> str:
        """The range in words, such as "at least 1"; empty without one."""
        if self.at_least is not None and self.at_most is not None:
            return f"from {_number(self.at_least)} to {_number(self.at_most)}"
        if self.auto is not None:
            return f"at least {_number(self.at_least or 0)}, or auto"
        bounds = {
            "at least": self.at_least,
            "more than": self.more_than,
            "at most": self.at_most,
            "less than": self.less_than,
        }
        return " and ".join(f"{words} {_number(bound)}" for words, bound in bounds.items() if bound is not None)

    def problem(self, value: Any) -> str:
        """The requirement that a value, or a number in a tuple, does not meet; empty for a valid value."""
        numbers = value if isinstance(value, tuple) else (value,)
        outside = [number for number in numbers if isinstance(number, (int, float)) and not self._allows(number)]
        if not outside:
            return ""
        range_text = self.limits
        if not all(map(math.isfinite, outside)) and self.at_most is None and self.less_than is None:
            range_text = " and ".join(filter(None, [range_text, "finite"]))
        each = "each " if isinstance(value, tuple) else ""
        return "; ".join(filter(None, [f"must {each}be {range_text}", self.advice]))

    def _allows(self, number: float) -> bool:
        if isinstance(number, bool) or (self.auto is not None and number == self.auto):
            return True
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.more_than is None or number > self.more_than)
            and (self.at_most is None or number <= self.at_most)
            and (self.less_than is None or number < self.less_than)
            and (math.isfinite(number) or (self.infinite and number > 0))
        )


def setting(
    default: Any,
    doc: str,
    *,
    path: bool | str = False,
    only_with: str | tuple[str, ...] = (),
    warn_without: str | tuple[str, ...] = (),
    **declared: Any,
) -> Any:
    """A dataclass field that declares a setting. ``declared``: further fields of Declared.

    ``path``: True for a path, or the text that separates paths in a value, such as "=" for name=path.
    ``only_with``, ``warn_without``: conditions such as "engine.precision=fp16" (see Condition).
    """
    separator: str | None = "" if path is True else path or None
    metadata = Declared(
        doc=" ".join(doc.split()),
        path=separator,
        only_with=_conditions(only_with),
        warn_without=_conditions(warn_without),
        **declared,
    )
    if isinstance(default, (list, dict)):
        # left out of the hash, so that a section can be the key of a dictionary; comparisons still include it
        return field(default_factory=partial(copy.copy, default), metadata={_KEY: metadata}, hash=False)
    return field(default=default, metadata={_KEY: metadata})


def declared(entry: Field) -> Declared:
    """The declaration of a field."""
    return entry.metadata[_KEY]


def _conditions(texts: str | tuple[str, ...]) -> tuple[Condition, ...]:
    return tuple(map(Condition.parse, [texts] if isinstance(texts, str) else texts))


def _number(bound: float) -> str:
    return f"{bound:,}" if bound >= 10**6 else f"{bound:g}"
