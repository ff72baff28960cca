"""A user's optimizer (hpclm.optim.maker) as hpclm's engines use it."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hpclm.config import OptimConfig
from hpclm.optim import maker
from hpclm.optim.adamw import bare
from hpclm.optim.maker import UserOptimizerMaker
from hpclm.optim.optimizers import OptimizedWeight, WholeMatrices


def make(weights: Sequence[OptimizedWeight], optim: OptimConfig) -> torch.optim.Optimizer:
    """The user's optimizer of these weights, wrapped."""
    loaded = maker.load(optim)
    return MatrixwiseOptimizer(loaded, weights) if loaded.matrices else UserOptimizer(loaded(weights))


class UserOptimizer(torch.optim.Optimizer):
    """A user's optimizer, ``inner``, with the number of updates of each parameter, and state that can be restored."""

    add_param_group = bare(torch.optim.Optimizer.add_param_group)
    zero_grad = bare(torch.optim.Optimizer.zero_grad)

    def __init__(self, inner: torch.optim.Optimizer):
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.state = inner.state
        self.updates: dict[Tensor, int] = {}
        self.initial = {parameter: deepcopy(kept) for parameter, kept in inner.state.items()}
        """State that some optimizers have before the first update of a weight."""

    def step(self, closure: Any = None) -> Any:
        """One update, without a closure."""
        every = self.inner.param_groups
        # DeepSpeed replaces param_groups to update one after the other. An optimizer with others inside it ignores its own groups
        self.inner.param_groups = self.param_groups
        updated = {parameter for group in self.param_groups for parameter in group["params"]}
        waiting = [(p, p.grad) for group in every for p in group["params"] if p not in updated]
        for parameter, _ in waiting:
            parameter.grad = None
        self.inner.step()
        self.inner.param_groups = every
        for parameter, gradient in waiting:
            parameter.grad = gradient
        self._count(p for p in updated if p.grad is not None)

    def _count(self, updated: Iterable[Tensor]) -> None:
        for parameter in updated:
            self.updates[parameter] = self.updates.get(parameter, 0) + 1

    def steps_taken(self) -> int:
        """The number of updates."""
        return max(self.updates.values(), default=0)

    def metrics(self) -> dict[str, Any]:
        """The named scalars of the last update, if the optimizer has any."""
        measured = getattr(self.inner, "metrics", None)
        return dict(measured()) if callable(measured) else {}

    def restore(self, parameter: Tensor, tensors: Mapping[str, Tensor] | None, steps: int) -> None:
        """Set the tensors of ``parameter`` after ``steps`` updates; None: its state before the first update."""
        self.state.pop(parameter, None)
        self.updates[parameter] = steps
        if tensors is not None and steps:
            self.state[parameter] = dict(tensors)
        elif parameter in self.initial:
            self.state[parameter] = deepcopy(self.initial[parameter])


class MatrixwiseOptimizer(UserOptimizer):
    """Updates the weights selected by ``matrices`` one by one: each on one process, which gathers its values and gradient, and returns
    the new values. The state of a matrix stays on that process."""

    def __init__(self, loaded: UserOptimizerMaker, weights: Sequence[Any]):
        whole = loaded.matrices or bool
        self.matrices = [weight for weight in weights if whole(weight.placement)]
        self._whole = {
            weight.parameter: nn.Parameter(weight.parameter.new_empty([0] * len(weight.placement.shape)))
            for weight in self.matrices
        }
        """matrix -> its parameter in ``inner``, which has values only during an update."""
        super().__init__(loaded([replace(w, parameter=self._whole.get(w.parameter, w.parameter)) for w in weights]))
        parts = {whole: parameter for parameter, whole in self._whole.items()}
        self.param_groups = [
            {**group, "params": [parts.get(p, p) for p in group["params"]]} for group in self.inner.param_groups
        ]

    def share(self, exchange: WholeMatrices) -> None:
        """Gather matrices through ``exchange``."""
        self.exchange = exchange

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all weights, without a closure."""
        for group, of_inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            of_inner.update({key: value for key, value in group.items() if key != "params"})
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
        self._count([*others, *self._whole])

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
        return values
