"""The number of steps that a run's settings plan, from the numbers in its config.yaml: the rest of hpclm.config is not loaded."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpclm.rundir import rows

_SECTION = re.compile(r"^(budget|batch|model):\n((?:  \w+: .+\n)+)(?! )", re.MULTILINE)
_VALUE = re.compile(r"  (\w+): (?:(null)|([0-9]{1,15})|.+)\n")


def steps(path: Path) -> int | None:
    """Steps that the budget in a settings file allows; None if its numbers alone do not determine them."""
    text = rows.tail(path, 1 << 20)
    sections = {name: dict(_values(body)) for name, body in _SECTION.findall(text)}
    try:
        return _within(sections)
    except (KeyError, TypeError, ValueError, ArithmeticError):  # not as hpclm writes it
        return _from_yaml(text)


def _values(body: str) -> Mapping[str, Any]:
    """The whole numbers and nulls in a section; other values as "", which is not a number."""
    return {name: None if null else int(number) if number else "" for name, null, number in _VALUE.findall(body)}


def _from_yaml(text: str) -> int | None:
    import yaml  # slow to load, and to read

    if "<<" in text:  # merge keys: hpclm does not write them, and they can expand without limit
        return None
    try:
        return _within(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, yaml.YAMLError):
        return None


def _within(content: Mapping[str, Any]) -> int | None:
    """The fewest steps of the budgets in steps, samples and tokens."""
    budget, batch = content["budget"], content["batch"]
    ends = [budget["steps"]] if budget.get("steps") is not None else []
    counts = [budget["samples"]] if budget.get("samples") is not None else []
    counts += [budget["tokens"] // content["model"]["context"]] if budget.get("tokens") is not None else []
    if counts and batch.get("rampup") is not None:
        from hpclm.config.plan import Plan, Rampup  # loads all of hpclm.config

        plan = Plan.divide(1, batch["global_size"], 1, Rampup(*batch["rampup"]))
        ends += map(plan.steps_within, counts)
    else:
        ends += [count // batch["global_size"] for count in counts]
    if not all(map(rows.count, ends)):
        raise ValueError
    return min(ends, default=None)
