"""Conditions on other settings, without which a setting has no effect.

=============================================  =====================================================
parallel.pipeline>1                            a number above 1
optim.schedule=wsd|fairseq_cosine|own          one of these values; own: any package.module:Name
data.source!=synthetic                         any value but this one
log.sinks                                      a value: not null, 0, false, none or empty
not job.container                              no value
engine.device!=cpu: it chooses GPU kernels     with a reason, for messages
=============================================  =====================================================
"""

import re
from dataclasses import dataclass
from typing import Any

from hpclm.config.checks import typed
from hpclm.registry import OWN

_FORM = re.compile(r"(not )?([a-z][\w.]*)(?:(=|!=|>)([^:]+))?(?:: (.+))?")
OWN_CODE = "own"


@dataclass(frozen=True)
class Condition:
    """A condition on one setting."""

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
        return cls(key, absent.strip() or sign, tuple(values.split("|")) if values else (), reason)

    def holds(self, value: Any) -> bool:
        """Whether it holds for this value of the setting."""
        text, absent = typed(value), value in (None, 0, False, "", "none", [], {})
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
        """The end of "X has no effect …" for this value; ``several``: the sentence has more than one subject."""
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
            return f"not {self.key}"
        return f"{self.key}{self.sign}{' or '.join(self.values)}"
