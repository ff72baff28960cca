"""Validates a checkpoint's scalars: they must have the form that an engine itself would save. Checked before anything is loaded."""

from collections.abc import Mapping
from typing import Any

from hpclm.base.errors import ConfigError

IMPORTED = {"optimizer_steps"}
"""The only scalars of imported weights; the engine's initial values serve for the others."""


def check_scalars(scalars: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """ConfigError unless ``scalars`` has every entry of an engine's ``own``, in the same form."""
    names = IMPORTED if scalars.keys() <= IMPORTED else own.keys()
    problems = [f"scalars.{name} is missing" for name in names if name not in scalars]
    for name in scalars.keys() & names:
        value = scalars[name]
        count = type(own[name]) is int
        if not fits(value, own[name]) or (count and (type(value) is not int or value < 0)):
            problems.append(f"scalars.{name} is {value!r:.60}, which no run with these settings saves")
    if problems:
        raise ConfigError(f"{problem}; restore the file, or start from another checkpoint" for problem in problems)


def fits(value: Any, own: Any) -> bool:
    """Whether ``value`` has the form of ``own``: the same keys for objects, the same shape for lists, and finite numbers."""
    if isinstance(own, dict):
        same = isinstance(value, dict) and (not own or value.keys() == own.keys())
        return same and all(fits(value[key], own[key]) for key in own)
    if isinstance(own, list):
        # groups of weights differ between layouts
        if isinstance(value, list) and own and isinstance(own[0], (dict, str)):
            own = own[:1] * len(value)
        return isinstance(value, list) and len(value) == len(own) and all(map(fits, value, own))
    if isinstance(own, str):
        return isinstance(value, str)
    # an initial value of a user's optimizer may be infinite
    return value == own or type(value) is type(own) is bool or (type(value) in (int, float) and abs(value) < 1e300)
