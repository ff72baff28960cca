"""Classification of Megatron's options by options.yaml: read, checked, or known to have no effect. Other options must not be set."""

import fnmatch
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from hpclm.base import files
from hpclm.base.errors import ConfigError
from hpclm.interop.pickles import StandIn

KINDS = ("network", "training", "experts")
GROUPS: dict[str, Any] = yaml.safe_load(files.read_text(Path(__file__).with_name("options.yaml")))
READ = {name for kind in KINDS for name in GROUPS[kind].split()}
CHECKED = {*GROUPS["network_values"], *GROUPS["training_values"]}
CHECKED |= {name for kind in KINDS for name in GROUPS[f"{kind}_unset"].split()}


def _pattern(*groups: str) -> re.Pattern[str]:
    texts = " ".join(GROUPS[group] for group in groups).split()
    return re.compile("|".join(fnmatch.translate(text) for text in texts))


WITHOUT_EFFECT = _pattern("without_effect", "experts_without_effect")
NOT_IMPORTED = _pattern("initial_weights", "of_other_networks")


def plain(value: Any) -> Any:
    """An option's value as a number or text; None for an empty container. A stand-in becomes the value of the enum member."""
    if isinstance(value, StandIn):
        value = "an object" if value.value is None else value.value
    if value is None or isinstance(value, bool | int | float):
        return value
    return None if isinstance(value, list | tuple | dict) and not value else str(value)[:200]


def argument(args: Namespace, *names: str, default: Any = None) -> Any:
    """The value of the first of ``names`` that is set in the arguments; ``default`` if none is."""
    given = (getattr(args, name, None) for name in names)
    values = (value.value if isinstance(value, StandIn) else value for value in given)
    return next((value for value in values if value is not None), default)


def experts(args: Namespace) -> int:
    """Number of experts in a layer; 0: the network has none."""
    count = argument(args, "num_experts", default=0)
    if count in (0, 1, [1]):
        return 0
    if type(count) is not int or count < 0:
        raise ConfigError(f"num_experts={count}: experts of Megatron-DeepSpeed are not supported")
    return count


def is_without_effect(name: str) -> bool:
    """Whether the option ``name`` changes neither a network nor its training."""
    return name not in READ | CHECKED and WITHOUT_EFFECT.fullmatch(name) is not None


def is_known(name: str) -> bool:
    """Whether the option ``name`` is in one of the groups."""
    return name in READ | CHECKED or is_without_effect(name) or NOT_IMPORTED.fullmatch(name) is not None


def of_network(args: Namespace) -> Iterator[str]:
    """Reasons why hpclm does not support the network; an unknown option may change it."""
    has_experts = experts(args) > 0
    yield from _wrong(args, "network")
    if has_experts:
        yield from _unset(args, "experts")
    for name, value in vars(args).items():
        without_effect = is_known(name) or (name.startswith("moe_") and not has_experts)
        if plain(value) and not without_effect:
            yield (
                f"{name}={plain(value)}: hpclm does not know this option; if it changes neither the network nor its training, give "
                f"--ignore {name}"
            )


def of_training(args: Namespace) -> Iterator[str]:
    """Reasons why hpclm cannot continue the run."""
    return _wrong(args, "training")


def _wrong(args: Namespace, kind: str) -> Iterator[str]:
    for name, supported in GROUPS[f"{kind}_values"].items():
        value = plain(getattr(args, name, None))
        if value is not None and value not in supported:
            yield f"{name}={value}, but hpclm supports {' or '.join(str(other) for other in supported if other is not None)}"
    yield from _unset(args, kind)


def _unset(args: Namespace, kind: str) -> Iterator[str]:
    for name in GROUPS[f"{kind}_unset"].split():
        value = plain(getattr(args, name, None))
        if value:
            yield f"{name}={value} is not supported"
