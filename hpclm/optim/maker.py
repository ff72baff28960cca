"""Loads a user's optimizer class or function, and makes the checks that need no weights."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.base.registry import hint
from hpclm.config.optimizers import Shape
from hpclm.optim.adamw import groups
from hpclm.optim.optimizers import Weight

if TYPE_CHECKING:
    from hpclm.config import OptimConfig

ARGUMENTS = "optim.arguments"
SET_BY = {"params": "the weights", "lr": "optim.lr", "weight_decay": "optim.weight_decay"}
"""Parameters of a class that optim.arguments cannot set, with the settings that do."""
FIRST = ("weights", "optim")
"""Parameters of a function or class that makes its own parameter groups."""


@dataclass(frozen=True)
class UserOptimizerMaker:
    """Makes the optimizer named by ``optim.name``."""

    name: str
    source: Callable[..., Any]
    """The class or function."""
    whole: Callable[[str, Shape], bool] | None
    """The attribute ``matrices`` of ``source``; None without it."""

    @property
    def groups_weights(self) -> bool:
        """Whether it is called with (weights, optim), and makes its own parameter groups."""
        given = [name for name in parameters_of(self.source) if name != "self"]
        return not inspect.isclass(self.source) or tuple(given[:2]) == FIRST

    @property
    def decays(self) -> bool:
        """Whether it reads optim.weight_decay."""
        return self.groups_weights or takes(parameters_of(self.source), "weight_decay")

    @property
    def shares(self) -> bool:
        """Whether it gathers whole matrices itself."""
        return callable(getattr(self.source, "share", None))

    def of_groups(self, parameter_groups: list[dict[str, Any]], optim: "OptimConfig") -> torch.optim.Optimizer:
        """The optimizer of these groups, from a class like torch.optim's."""
        parameters = parameters_of(self.source)
        if not takes(parameters, "weight_decay"):
            parameter_groups = [{k: v for k, v in group.items() if k != "weight_decay"} for group in parameter_groups]
        rates = {name: getattr(optim, name) for name in ("lr", "weight_decay") if takes(parameters, name)}
        optimizer: torch.optim.Optimizer = self.source(parameter_groups, **rates, **self.arguments(optim))
        return optimizer

    def arguments(self, optim: "OptimConfig") -> dict[str, Any]:
        """optim.arguments; a list becomes a tuple if the parameter's default is a tuple."""
        defaults = {name: parameter.default for name, parameter in parameters_of(self.source).items()}
        return {
            name: tuple(value) if isinstance(value, list) and isinstance(defaults.get(name), tuple) else value
            for name, value in optim.arguments.items()
        }

    def __call__(self, weights: Sequence[Weight], optim: "OptimConfig") -> torch.optim.Optimizer:
        """The unwrapped optimizer of these weights."""
        if not self.groups_weights:
            return self.of_groups(groups(weights, optim), optim)
        optimizer = self.source(weights, optim, **self.arguments(optim))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optim.name={self.name} returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer"
            )
        return optimizer


def parameters_of(source: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of ``source``, by name."""
    return inspect.signature(source).parameters


def takes(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    """Whether ``name`` can be passed by keyword."""
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _problem(source: Any) -> str | None:
    """The fault of a user's optimizer that can be found without weights, or None."""
    wanted = (
        "it must be a subclass of torch.optim.Optimizer, or a function or class that is called with (weights, optim)"
    )
    if not (inspect.isclass(source) or inspect.isfunction(source)):
        return f"is neither a class nor a function: {wanted}"
    try:
        given = list(parameters_of(source).values())
    except (TypeError, ValueError):
        return f"has no signature: {wanted}"
    if inspect.isfunction(source) or not issubclass(source, torch.optim.Optimizer):
        named = tuple(p.name for p in given[:2]) == FIRST
        if not (named or (inspect.isfunction(source) and sum(p.default is p.empty for p in given) == 2)):
            return f"cannot be called with (weights, optim): {wanted}"
        return None
    step = inspect.signature(source.step).parameters.get("closure")
    if step is not None and step.default is step.empty:
        return "needs a closure that recomputes the loss in each update, which hpclm's engines do not provide; choose another optimizer"
    return None


CHECK = _problem


def unknown_arguments(name: str, source: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str]:
    """The entries of optim.arguments that the optimizer ``name`` does not accept, as messages."""
    parameters = parameters_of(source)
    taken = [n for n in parameters if n not in (*SET_BY, *FIRST, "self")]
    problems = []
    for argument in arguments:
        if argument in SET_BY:
            problems.append(f"{ARGUMENTS}.{argument} cannot be set; {name} gets {SET_BY[argument]}")
        elif not takes(parameters, argument) or argument in FIRST:
            accepted = f"it takes {', '.join(taken) or 'none'}"
            problems.append(f"{ARGUMENTS}.{argument}: {name} has no such parameter; {accepted}.{hint(argument, taken)}")
    return problems
