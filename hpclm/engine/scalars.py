"""What a checkpoint's scalars may be: all that an engine loads are checked by one table, before it changes anything."""

from collections.abc import Callable, Mapping
from typing import Any

from hpclm.errors import ConfigError

Check = Callable[[Any], bool]
"""Whether a run could have saved this value."""
IMPORTED = {"optimizer_steps"}
"""The only scalars of imported weights; an engine begins with its own values of the others."""


def check(scalars: Mapping[str, Any], table: Mapping[str, Check]) -> None:
    """ConfigError unless ``scalars`` has a valid value for each name in ``table``."""
    names = IMPORTED if scalars.keys() <= IMPORTED else table.keys()
    missing = [f"scalars.{name} is missing" for name in names if name not in scalars]
    invalid = [name for name in names if name in scalars and not table[name](scalars[name])]
    if problems := missing + [f"scalars.{name} is {scalars[name]!r:.60}, which no run saves" for name in invalid]:
        raise ConfigError(f"{problem}; restore the file, or start from another checkpoint" for problem in problems)


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return type(value) in (int, float) and -1e300 < value < 1e300


def is_count(value: Any) -> bool:
    """Whether it is an integer of at least 0."""
    return type(value) is int and 0 <= value < 1 << 53


def is_array(value: Any, shape: tuple[int, ...], fits: Check) -> bool:
    """Whether it is nested lists of this shape, of values that fit."""
    if not shape:
        return fits(value)
    return isinstance(value, list) and len(value) == shape[0] and all(is_array(row, shape[1:], fits) for row in value)


def is_loss_scale(value: Any) -> bool:
    """Whether it is ``vars`` of a LossScale, or {} for an engine without one."""
    if value == {}:
        return True
    if not isinstance(value, dict) or value.keys() != {"value", "hysteresis", "good_steps"}:
        return False
    return (
        is_number(value["value"])
        and value["value"] > 0
        and is_count(value["hysteresis"])
        and is_count(value["good_steps"])
    )
