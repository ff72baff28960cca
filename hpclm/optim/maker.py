"""What makes an optimizer of the user's own, and whether it can be one, as far as that shows without a weight."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hpclm.config.optimizers import Shape
from hpclm.errors import ConfigError
from hpclm.optim.adamw import groups
from hpclm.optim.optimizers import Weight
from hpclm.registry import hint

if TYPE_CHECKING:
    from hpclm.config import OptimConfig

ARGUMENTS = "optim.arguments"
SET_BY = {"params": "the weights", "lr": "optim.lr", "weight_decay": "optim.weight_decay"}
"""Parameters of a class that optim.arguments cannot set, and what does."""
FIRST = ("weights", "optim")
"""What a function or class is called with that makes its own parameter groups."""


@dataclass(frozen=True)
class UserOptimizerMaker:
    """What makes the optimizer that ``optim.name`` names."""

    name: str
    source: Callable[..., Any]
    """The class or function itself."""
    whole: Callable[[str, Shape], bool] | None
    """Its ``matrices``."""

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
        """Of a class as torch.optim has them, an optimizer of these groups."""
        parameters = parameters_of(self.source)
        if not takes(parameters, "weight_decay"):
            parameter_groups = [{k: v for k, v in group.items() if k != "weight_decay"} for group in parameter_groups]
        rates = {name: getattr(optim, name) for name in ("lr", "weight_decay") if takes(parameters, name)}
        optimizer: torch.optim.Optimizer = self.source(parameter_groups, **rates, **self.arguments(optim))
        return optimizer

    def arguments(self, optim: "OptimConfig") -> dict[str, Any]:
        """optim.arguments, lists as tuples where that is what the parameter has."""
        defaults = {name: parameter.default for name, parameter in parameters_of(self.source).items()}
        return {
            name: tuple(value) if isinstance(value, list) and isinstance(defaults.get(name), tuple) else value
            for name, value in optim.arguments.items()
        }

    def __call__(self, weights: Sequence[Weight], optim: "OptimConfig") -> torch.optim.Optimizer:
        """Its optimizer of these weights, as it is."""
        if not self.groups_weights:
            return self.of_groups(groups(weights, optim), optim)
        optimizer = self.source(weights, optim, **self.arguments(optim))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optim.name={self.name} returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer"
            )
        return optimizer


def parameters_of(source: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """What can be called with what."""
    return inspect.signature(source).parameters


def takes(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    """Whether one can give ``name`` by keyword."""
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _problem(source: Any) -> str | None:
    """What is wrong with a user's optimizer, as far as one sees without a weight."""
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
        return "needs a closure that computes the loss again in each update, which no engine of hpclm gives it; choose another optimizer"
    return None


CHECK = _problem


def unknown_arguments(name: str, source: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str]:
    """The entries of optim.arguments that the optimizer called ``name`` does not take, in words."""
    parameters = parameters_of(source)
    taken = [n for n in parameters if n not in (*SET_BY, *FIRST, "self")]
    problems = []
    for argument in arguments:
        if argument in SET_BY:
            problems.append(f"{ARGUMENTS}.{argument} cannot be set; {SET_BY[argument]} is what {name} gets")
        elif not takes(parameters, argument) or argument in FIRST:
            accepted = f"it takes {', '.join(taken)}" if taken else "it takes none"
            problems.append(f"{ARGUMENTS}.{argument}: {name} has no such parameter; {accepted}.{hint(argument, taken)}")
    return problems
