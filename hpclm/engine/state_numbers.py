"""Numbers in the state of a user's optimizer, of each weight and in parameter groups: how a checkpoint's scalars store them.

A number is a Python number or a tensor without dimensions. It is restored with the same type, next to its weight or in CPU memory.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.parallel.collectives import all_gather_objects
from hpclm.parallel.mesh import Axis

KINDS = ("state", "group")
"""Numbers in the state of a weight, and in its parameter group."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
}
Numbers = Mapping[str, Mapping[str, Any]]
"""For each of KINDS, the numbers of a weight by name, as JSON."""


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number that a checkpoint can store; not NaN, which no run resumes from."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype in DTYPES.values() and not bool(value.isnan())
    return isinstance(value, (int, float)) and value == value


def encoded(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The numbers among ``values``, as JSON; a tensor becomes [value, type, whether it is on the ``device`` of the weight]."""
    return {
        name: [value.item(), str(value.dtype).removeprefix("torch."), value.device == device]
        if isinstance(value, Tensor)
        else value
        for name, value in values.items()
        if is_number(value)
    }


def decoded(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The numbers that ``encoded`` has made JSON of."""
    return {
        name: torch.tensor(value[0], dtype=DTYPES[value[1]], device=device if value[2] else "cpu")
        if isinstance(value, list)
        else value
        for name, value in values.items()
    }


def gathered(numbers: Mapping[str, Numbers], world: Axis) -> dict[str, Numbers]:
    """The numbers of all weights of all processes, by weight; a collective. ConfigError if processes have different ones of a weight."""
    found: dict[str, Numbers] = {}
    for name, values in (pair for given in all_gather_objects(numbers, world) for pair in given.items()):
        if repr(found.setdefault(name, values)) != repr(values):
            raise ConfigError(
                f"the optimizer keeps different numbers of {name} on different processes, {found[name]} and {values}: a number must not "
                "depend on the part of a weight that a process holds; or set checkpoint.enabled=false"
            )
    return found


def check_numbers(saved: Any) -> None:
    """ConfigError if ``saved``, by weight, is not what a run saves."""
    try:
        for entry in saved.values():
            values = [value for kind in KINDS for value in decoded(entry[kind], torch.device("cpu")).values()]
            if not all(is_number(value) for value in values):
                raise ValueError
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"scalars.optimizer_numbers is {saved!r:.60}, which no run with these settings saves; restore the file, or start from another "
            "checkpoint"
        ) from None
