"""Loads a user's optimizer, optim.name=package.module:Name: a class like torch.optim's, or a function or class that is called with
(weights, optim). It declares in attributes which layouts may divide its work:

splits = True: its update treats every value on its own, so any layout may split weights.
matrices = True: it needs every weight whole. Or a function Placement -> bool: it needs these whole, and treats the values of others on
their own.

Without either, it trains where every process holds all weights whole.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.base.registry import hint, lookup
from hpclm.config import OptimConfig
from hpclm.config.optimizers import OF_USERS, OptimizerKind
from hpclm.optim.adamw import groups
from hpclm.optim.optimizers import OptimizedWeight
from hpclm.parallel.placement import Placement

ARGUMENTS = "optim.arguments"
SET_BY = {"params": "the weights", "lr": "optim.lr", "weight_decay": "optim.weight_decay"}
"""Parameters of a class that optim.arguments cannot set, with the settings that do."""
FIRST = ("weights", "optim")
"""Parameters of a function or class that makes its own parameter groups."""
SPLITS = [
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
]
"""PyTorch's optimizers that treat every value on its own."""
NEEDED = "it must be a subclass of torch.optim.Optimizer, or a function or class that is called with (weights, optim)"


@dataclass(frozen=True)
class UserOptimizerMaker:
    """Makes the optimizer named by ``optim.name``."""

    optim: OptimConfig
    source: Callable[..., Any]
    """The class or function."""

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of ``source``, by name."""
        return inspect.signature(self.source).parameters

    @property
    def splits(self) -> bool:
        """Whether its update treats every value on its own."""
        return getattr(self.source, "splits", self.source in SPLITS) is True

    @property
    def matrices(self) -> Callable[[Placement], bool] | None:
        """Whether it needs a weight whole; None if it does not declare that."""
        declared = getattr(self.source, "matrices", None)
        return (lambda placement: True) if declared is True else declared or None

    @property
    def kind(self) -> OptimizerKind:
        """The row as in OPTIMIZERS. Its state is known only after the first update; the planner assumes AdamW's."""
        return replace(OF_USERS, path=self.optim.name, matrices=self.matrices, family=self.optim.name)

    @property
    def groups_weights(self) -> bool:
        """Whether it is called with (weights, optim), and makes its own parameter groups."""
        given = [name for name in self.parameters if name != "self"]
        return not inspect.isclass(self.source) or tuple(given[:2]) == FIRST

    def takes(self, name: str) -> bool:
        """Whether ``name`` can be passed by keyword."""
        return name in self.parameters or any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    def __call__(self, weights: Sequence[OptimizedWeight]) -> torch.optim.Optimizer:
        """The unwrapped optimizer of these weights; ConfigError if it cannot be made."""
        optim = self.optim
        defaults = {name: parameter.default for name, parameter in self.parameters.items()}
        arguments = {
            name: tuple(value) if isinstance(value, list) and isinstance(defaults.get(name), tuple) else value
            for name, value in optim.arguments.items()
        }
        try:
            if self.groups_weights:
                optimizer = self.source(weights, optim, **arguments)
            else:
                of_weights = groups(weights, optim)
                for group in of_weights if not self.takes("weight_decay") else ():
                    del group["weight_decay"]
                rates = {name: getattr(optim, name) for name in ("lr", "weight_decay") if self.takes(name)}
                optimizer = self.source(of_weights, **rates, **arguments)
        except Exception as error:  # the user's code may raise anything
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"in {frame.filename}, line {frame.lineno}"
            raise ConfigError(
                f"optim.name={optim.name} cannot be made, {where}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optim.name={optim.name} returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer"
            )
        problem = _schedule_free(optimizer)
        if problem:
            raise ConfigError(f"optim.name={optim.name} {problem}")
        return optimizer


def load(optim: OptimConfig) -> UserOptimizerMaker:
    """The user's optimizer named by ``optim``; ConfigError if it does not exist or does not take its arguments."""
    maker = UserOptimizerMaker(optim, lookup("optim.name", optim.name, {}, CHECK))
    problems = list(_wrong_settings(maker))
    if problems:
        raise ConfigError(problems)
    return maker


def _schedule_free(optimizer: Any) -> str | None:
    if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
        return (
            "has eval() and train(), as schedule-free optimizers have: it evaluates other weights than those it trains, and hpclm would "
            "evaluate, keep as best and export the trained ones"
        )
    return None


def _problem(source: Any) -> str | None:
    """The fault of a user's optimizer that can be found without weights, or None."""
    if not (inspect.isclass(source) or inspect.isfunction(source)):
        return f"is neither a class nor a function: {NEEDED}"
    try:
        given = list(inspect.signature(source).parameters.values())
    except (TypeError, ValueError):
        return f"has no signature: {NEEDED}"
    matrices = getattr(source, "matrices", False)
    if not isinstance(matrices, bool) and not (
        inspect.isfunction(matrices) and len(inspect.signature(matrices).parameters) == 1
    ):
        return "must declare `matrices` as True or as a function of a weight's Placement, without self"
    if inspect.isfunction(source) or not issubclass(source, torch.optim.Optimizer):
        named = tuple(p.name for p in given[:2]) == FIRST
        if not (named or (inspect.isfunction(source) and sum(p.default is p.empty for p in given) == 2)):
            return f"cannot be called with (weights, optim): {NEEDED}"
        return None
    step = inspect.signature(source.step).parameters.get("closure")
    if step is not None and step.default is step.empty:
        return "needs a closure that recomputes the loss in each update, which hpclm's engines do not provide; choose another optimizer"
    return _schedule_free(source)


CHECK = _problem


def _wrong_settings(maker: UserOptimizerMaker) -> Iterator[str]:
    """Settings that the optimizer does not accept, and those without effect."""
    optim = maker.optim
    taken = [name for name in maker.parameters if name not in (*SET_BY, *FIRST, "self")]
    for argument in optim.arguments:
        if argument in SET_BY:
            yield f"{ARGUMENTS}.{argument} cannot be set; {optim.name} gets {SET_BY[argument]}"
        elif not maker.takes(argument) or argument in FIRST:
            accepted = f"it takes {', '.join(taken) or 'none'}"
            yield f"{ARGUMENTS}.{argument}: {optim.name} has no such parameter; {accepted}.{hint(argument, taken)}"
    if maker.groups_weights or maker.takes("weight_decay"):
        return
    default = next(entry.default for entry in fields(optim) if entry.name == "weight_decay")
    if optim.weight_decay not in (default, 0):
        yield f"optim.weight_decay={optim.weight_decay} has no effect with optim.name={optim.name}, which has no parameter weight_decay"
    for entry in optim.groups:
        if "weight_decay" in entry:
            yield f"optim.groups: {entry}: optim.name={optim.name} has no parameter weight_decay"
