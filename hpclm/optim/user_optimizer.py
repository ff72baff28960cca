"""A user's optimizer, optim.name=package.module:Name: a class like torch.optim's, or a function or class that is called with (weights,
optim). It may declare attributes:

state_tensors: the state that it keeps of a weight, {"exp_avg": "weight"} for a tensor of the weight's shape, "scalar" for a single
value; or a function (name, shape, optim) -> {name: StateTensor}.
group_state: names of numbers in parameter groups that its updates change.
matrices: a function (name, shape) -> bool that selects the weights to update whole, even if they are split over processes.

Anything undeclared is measured on small weights (hpclm.optim.trial).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpclm.base.errors import ConfigError
from hpclm.base.registry import lookup
from hpclm.config import OptimConfig
from hpclm.config.optimizers import EXAMPLES, OptimizerKind, Shape, State, StateTensor, stacked
from hpclm.optim import trial
from hpclm.optim.adamw import bare, groups
from hpclm.optim.maker import CHECK, UserOptimizerMaker, unknown_arguments
from hpclm.optim.optimizers import Weight, WholeMatrices
from hpclm.optim.trial import OptimizerTrial, copied

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class LoadedOptimizer:
    """A user's optimizer, its measurements, and its row as in OPTIMIZERS."""

    maker: UserOptimizerMaker
    trial: OptimizerTrial
    kind: OptimizerKind


def load(optim: OptimConfig) -> LoadedOptimizer:
    """The optimizer named by ``optim``, tried on small weights; ConfigError if it cannot be used."""
    return _load(optim.name, json.dumps(optim.arguments))


def tried_with_experts(optim: OptimConfig) -> OptimizerTrial:
    """LoadedOptimizer.trial with weights of experts among the small ones; ConfigError if the optimizer fails on them."""
    return _tried_with_experts(optim.name, json.dumps(optim.arguments))


@cache
def _tried_with_experts(name: str, arguments: str) -> OptimizerTrial:
    optim = OptimConfig(name=name, arguments=json.loads(arguments))
    return trial.measure(load(optim).maker, optim, list(trial.SHAPES))


@cache
def _load(name: str, arguments: str) -> LoadedOptimizer:
    source = lookup("optim.name", name, {}, CHECK)
    optim = OptimConfig(name=name, arguments=json.loads(arguments))
    problems = list(unknown_arguments(name, source, optim.arguments))
    if problems:
        raise ConfigError(problems)
    declared = getattr(source, "state_tensors", {})
    if not callable(declared) and not (isinstance(declared, Mapping) and {*declared.values()} <= {"weight", "scalar"}):
        raise ConfigError(
            f"optim.name={name}: state_tensors={declared!r} must look like {{'exp_avg': 'weight'}}, where weight is a tensor of the weight's "
            "shape and scalar a single value, or a function (name, shape, optim) -> {name: StateTensor}"
        )
    _check_functions(name, source)
    maker = UserOptimizerMaker(name, source, getattr(source, "matrices", None))
    if maker.whole and maker.groups_weights and not maker.shares:
        raise ConfigError(
            f"optim.name={name} declares `matrices` and is called with (weights, optim), so it needs a method share(exchange) that gathers "
            "them; hpclm gathers matrices only for classes called with parameter groups, like those of torch.optim"
        )
    tried = trial.measure(maker, optim)
    group_state = tuple(getattr(source, "group_state", tried.group_state))
    if group_state and maker.whole and not maker.shares:
        raise ConfigError(
            f"optim.name={name} changes {', '.join(group_state)} of its parameter groups and declares `matrices`: hpclm updates matrices one by "
            "one, so such a number is undefined; keep it in the state of each weight, or write share(exchange)"
        )
    kind = OptimizerKind(
        name, "of your own", _state_of(maker, tried), group_state=group_state, matrices=maker.whole, family=name
    )
    return LoadedOptimizer(maker, tried, kind)


def _check_functions(name: str, source: Any) -> None:
    """ConfigError if a declared function cannot be called with its arguments."""
    example, shape = EXAMPLES[0]
    calls = {
        "matrices": ((example, shape), "name, shape"),
        "state_tensors": ((example, shape, OptimConfig()), "name, shape, optim"),
    }
    for attribute, (arguments, shown) in calls.items():
        function = getattr(source, attribute, None)
        try:
            if callable(function):
                function(*arguments)
        except TypeError as error:
            raise ConfigError(
                f"optim.name={name}: {attribute} must be a function of ({shown}), without self: {error}"
            ) from error


def make(weights: Sequence[Weight], optim: OptimConfig) -> torch.optim.Optimizer:
    """The user's optimizer of these weights, wrapped."""
    loaded = load(optim)
    kept = {}
    for weight in weights:
        tried = tried_with_experts(optim) if stacked(weight.name) else loaded.trial
        kept[weight.parameter] = tried.scalars(weight.name, weight.shape)
    optimizer: UserOptimizer
    if loaded.maker.whole and not loaded.maker.shares:
        optimizer = MatrixwiseOptimizer(loaded, weights, optim, kept)
    else:
        inner = loaded.maker(weights, optim)
        optimizer = UserOptimizer(inner, kept, loaded.trial.scalars("", (1,)), loaded.trial.begun)
    optimizer.lost = loaded.trial.lost
    return optimizer


class UserOptimizer(torch.optim.Optimizer):
    """A user's optimizer, ``inner``, with state that can be saved and restored, whatever it keeps and counts."""

    add_param_group = bare(torch.optim.Optimizer.add_param_group)
    zero_grad = bare(torch.optim.Optimizer.zero_grad)
    lost: str | None = None
    """State that a checkpoint cannot have; see OptimizerTrial."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        scalars: Mapping[Tensor, Mapping[str, Any]],
        of_others: Mapping[str, Any],
        begun: Mapping[str, Any],
    ):
        """``scalars``: for each weight, an example of each number that ``inner`` keeps of it after an update. ``of_others``: the same for
        parameters that are not weights, such as those that a library flattens together. ``begun``: the whole state of a vector before
        the first update."""
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.state = inner.state
        self._scalars = scalars
        self._of_others = of_others
        self._begun = begun
        self._initial = {parameter: dict(kept) for parameter, kept in inner.state.items()}
        """State that some optimizers have before the first update of a weight."""

    def share(self, exchange: WholeMatrices) -> None:
        """See MatrixOptimizer."""
        self.inner.share(exchange)  # type: ignore[attr-defined]

    def step(self, closure: Any = None) -> Any:
        """One update, without a closure; counts steps of weights if ``inner`` does not."""
        updated = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with self._only(self.param_groups):
            self.inner.step()
        for parameter in updated:
            self._count(parameter)

    @contextmanager
    def _only(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Give ``inner`` only these groups inside this context: DeepSpeed replaces param_groups to update one after the other."""
        every = self.inner.param_groups
        if len(groups) == len(every):
            yield
            return
        chosen = {parameter for group in groups for parameter in group["params"]}
        others = [(p, p.grad) for group in every for p in group["params"] if p not in chosen]
        self.inner.param_groups = groups
        # an optimizer with others inside it ignores its own groups
        for parameter, _ in others:
            parameter.grad = None
        try:
            yield
        finally:
            self.inner.param_groups = every
            for parameter, gradient in others:
                parameter.grad = gradient

    def _count(self, parameter: Tensor) -> None:
        if "step" not in self.of(parameter):
            kept = self.state[parameter]
            kept["step"] = kept.get("step", 0) + 1

    def of(self, parameter: Tensor) -> Mapping[str, Any]:
        """Examples of the numbers that ``inner`` keeps of a parameter."""
        return self._scalars.get(parameter, self._of_others)

    def metrics(self) -> dict[str, Any]:
        """The named scalars of the last update, if the optimizer has any."""
        measured = getattr(self.inner, "metrics", None)
        return dict(measured()) if callable(measured) else {}

    def restore(self, parameter: Tensor, tensors: Mapping[str, Tensor] | None, steps: int) -> None:
        """Set the state of ``parameter`` after ``steps`` updates; None: the state before the first update."""
        self.state.pop(parameter, None)
        if (
            parameter not in self._initial
        ):  # a library has flattened the weights together, so their separate states are dropped
            for weight in self._initial:
                self.state.pop(weight, None)
        if tensors is None or not steps:
            if self._initial or self._begun:
                self.state[parameter] = self._before_updates(parameter)
            return
        self.state[parameter] = {**tensors, "step": restored(self.of(parameter).get("step", 0), steps, parameter)}

    def _before_updates(self, parameter: Tensor) -> dict[str, Any]:
        """The state that ``inner`` has of a parameter, possibly one that a library has flattened, before its first update."""
        if parameter in self._initial:
            return {name: copied(value) for name, value in self._initial[parameter].items()}
        begun = {name: copied(value) for name, value in self._begun.items()}
        for name, value in begun.items():
            if isinstance(value, Tensor) and value.ndim:
                begun[name] = torch.full_like(parameter, value.flatten()[0].item())
        return begun

    def place(self, parameter: Tensor, name: str, value: Tensor) -> Tensor:
        """A saved tensor on the device where ``inner`` keeps it: numbers are often in CPU memory."""
        example = self.of(parameter).get(name)
        if isinstance(example, Tensor) and example.device.type == "cpu":
            return value.to(example.device)
        return value


class MatrixwiseOptimizer(UserOptimizer):
    """Updates the weights selected by ``matrices`` one by one: each on one process, which gathers its values and gradient, and returns
    the new values. The state of a matrix stays on that process."""

    def __init__(
        self,
        loaded: LoadedOptimizer,
        weights: Sequence[Weight],
        optim: OptimConfig,
        scalars: Mapping[Tensor, Mapping[str, Any]],
    ):
        maker = loaded.maker
        of_weights = groups(weights, optim)
        assert maker.whole
        self.matrices = [weight for weight in weights if maker.whole(weight.name, weight.shape)]
        self._whole = {
            weight.parameter: nn.Parameter(weight.parameter.new_empty([0] * len(weight.shape)))
            for weight in self.matrices
        }
        """matrix -> its parameter in ``inner``, which has values only during an update."""
        substituted = [{**group, "params": [self._whole.get(p, p) for p in group["params"]]} for group in of_weights]
        super().__init__(
            maker.of_groups(substituted, optim), scalars, loaded.trial.scalars("", (1,)), loaded.trial.begun
        )
        self.of_class = self.inner.param_groups
        self.param_groups = [
            {**group, "params": weights_of["params"]}
            for group, weights_of in zip(self.of_class, of_weights, strict=True)
        ]

    def share(self, exchange: WholeMatrices) -> None:
        """Gather matrices through ``exchange``."""
        self.exchange = exchange

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all weights, without a closure."""
        for group, of_class in zip(self.param_groups, self.of_class, strict=True):
            of_class.update({key: value for key, value in group.items() if key != "params"})
        others = [p for group in self.param_groups for p in group["params"] if p not in self._whole]
        gradients = [parameter.grad for parameter in others]
        for parameter in others:
            parameter.grad = None
        for numbers in self.exchange.rounds:
            parameters = [self.matrices[number].parameter for number in numbers]
            given = [p.grad for p in parameters if p.grad is not None]
            self.exchange(numbers, [p.detach() for p in parameters], self._gather)
            for parameter, values in zip(parameters, self.exchange(numbers, given, self._update), strict=True):
                parameter.copy_(values.view_as(parameter))
        for parameter, gradient in zip(others, gradients, strict=True):
            parameter.grad = gradient
        self.inner.step()
        for parameter in others:
            self._count(parameter)

    def restore(self, parameter: Tensor, tensors: Mapping[str, Tensor] | None, steps: int) -> None:
        """See UserOptimizer; only the process that works on a matrix keeps state of it."""
        elsewhere = {weight.parameter for weight in self.matrices if weight.name not in self.exchange.worked_on}
        super().restore(parameter, None if parameter in elsewhere else tensors, steps)

    def _gather(self, number: int, values: Tensor) -> Tensor:
        self._whole[self.matrices[number].parameter].data = values.clone()
        return values

    def _update(self, number: int, gradient: Tensor) -> Tensor:
        """The new values of a matrix, given its gradient."""
        parameter = self.matrices[number].parameter
        whole = self._whole[parameter]
        if self.state.get(parameter):
            self.state[whole] = self.state.pop(parameter)
        whole.grad = gradient.clone()
        self.inner.step()
        whole.grad = None
        values = whole.data
        whole.data = values.new_empty([0] * values.ndim)
        self.state[parameter] = self.state.pop(whole, {})
        self._count(parameter)
        return values


def restored(example: Any, steps: int, parameter: Tensor) -> Any:
    """A step count in the type and on the device of ``example``; in another type, powers with it as the exponent would
    have other bits."""
    if isinstance(example, Tensor):
        device = example.device if example.device.type == "cpu" else parameter.device
        return torch.full_like(example, float(steps), device=device)
    return type(example)(steps)


def _state_of(maker: UserOptimizerMaker, tried: OptimizerTrial) -> Callable[[str, Shape, Any], State]:
    declared = getattr(maker.source, "state_tensors", None)
    gathers = maker.whole if maker.whole and not maker.shares else None

    def state(name: str, shape: Shape, optim: Any) -> State:
        if callable(declared):
            tensors = declared(name, shape, optim)
        elif declared is not None:
            scalar = StateTensor((), "everywhere")
            tensors = {key: StateTensor(tuple(shape)) if what == "weight" else scalar for key, what in declared.items()}
        else:
            trial = tried_with_experts(optim) if stacked(name) else tried
            tensors = dict(trial.state(name, shape))
        if gathers and gathers(name, shape):
            return {key: replace(tensor, where="matrix") for key, tensor in tensors.items()}
        return dict(tensors)

    return state
