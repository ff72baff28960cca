"""An engine's fp32 weights and optimizer state, as logical tensors that any layout can read: a weight at a time.

A checkpoint has a weight as ``model.NAME``, and each tensor that the optimizer keeps of it as ``optim.TENSOR.NAME``, by the name
that the optimizer gives it (hpclm.optim.optimizers).
"""

from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from hpclm.config.optimizers import Declared
from hpclm.engine import SavedState, Shard
from hpclm.engine.save_plan import SavePlan
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.errors import ConfigError
from hpclm.optim.adamw import set_state, steps_by_group, steps_taken

SET_EVERY_STEP = ("params", "lr")
"""Entries of a parameter group that the engine sets."""


class UnsavableStateError(ConfigError):
    """The optimizer keeps something that a checkpoint would leave out."""


class TrainingState:
    """The state of an optimizer that updates ``ShardedParameter.parameter`` itself; for wrapped ones, override what differs."""

    def __init__(self, optimizer: torch.optim.Optimizer, declared: Declared):
        self.optimizer, self.declared = optimizer, declared
        self._groups = [options(group) for group in optimizer.param_groups]

    def held(self, weight: ShardedParameter) -> ShardedParameter:
        """``weight``, with the run of its values that this process keeps."""
        return weight

    def names(self, weight: ShardedParameter) -> list[str]:
        """The tensors that the optimizer keeps of a weight now; none before its first update."""
        its, shape = self.optimizer.state.get(weight.parameter, {}), weight.parameter.shape
        return [n for n, value in its.items() if n != "step" and isinstance(value, Tensor) and value.shape == shape]

    def values(self, weight: ShardedParameter, name: str | None = None) -> Tensor:
        """This process's values of a weight, or of the optimizer's tensor ``name`` of it."""
        return self.optimizer.state[weight.parameter][name] if name else weight.parameter.detach()

    def gradient(self, weight: ShardedParameter) -> Tensor | None:
        """This process's values of a weight's gradient, as the optimizer reads it in the update that it is about to make; None if this
        update does not change the weight."""
        return weight.parameter.grad

    def steps(self) -> int:
        """Updates so far."""
        return steps_taken(self.optimizer)

    def owners(self, weights: Sequence[ShardedParameter]) -> Iterator[tuple[str, Tensor, Collection[str]]]:
        """The keys of the optimizer's state: the name of each, the parameter, and the tensors of it that are saved."""
        for weight in weights:
            yield weight.name, weight.parameter, self.declared(weight.name, weight.shape)

    def unsaved(self, weights: Sequence[ShardedParameter]) -> Iterator[str]:
        """What the optimizer keeps besides what ``tensors`` and ``steps`` save, in words."""
        owners = list(self.owners(weights))
        for name, parameter, saved in owners:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not (is_count(value) if key == "step" else key in saved and is_like(value, parameter)):
                    yield f"{key!r} of {name}, {described(value)}"
        parameters = {parameter for _, parameter, _ in owners}
        for key in self.optimizer.state.keys() - parameters:
            yield f"state of {described(key)}, which is no weight"
        counters = {"step"} if steps_by_group(self.optimizer) else set()
        for before, group in zip(self._groups, self.optimizer.param_groups, strict=True):
            for key in group.keys() - counters - {*SET_EVERY_STEP}:
                if key not in before or not equal(before[key], group[key]):
                    yield f"{key!r} of a parameter group, {described(group[key])}, which its updates change"

    def tensors(self, plan: SavePlan) -> Iterator[Shard]:
        """The shards that this process saves."""
        for number, weight in enumerate(plan.weights):
            yield from plan.shards(number, f"model.{weight.name}", self.values(weight))
            for name in self.names(weight):
                yield from plan.shards(number, f"optim.{name}.{weight.name}", self.values(weight, name))

    def load(self, plan: SavePlan, saved: SavedState, steps: int) -> None:
        """Load the weights, and the optimizer's state if there were ``steps`` updates."""
        given = saved.shapes() if steps else {}
        for number, weight in enumerate(plan.weights):
            plan.load(number, f"model.{weight.name}", saved, weight.parameter)
            names = [n for n in self.declared(weight.name, weight.shape) if f"optim.{n}.{weight.name}" in given]
            tensors = {name: torch.empty_like(weight.parameter) for name in names}
            for name, values in tensors.items():
                plan.load(number, f"optim.{name}.{weight.name}", saved, values)
            set_state(self.optimizer, weight.parameter, tensors, steps)


def is_count(value: Any) -> bool:
    """Whether ``value`` is a step count."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))


def is_like(value: Any, parameter: Tensor) -> bool:
    """Whether ``value`` is a tensor in fp32 of the parameter's shape; what DeepSpeed keeps on a disk has no values now."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return False
    return value.shape == parameter.shape or 0 in (value.numel(), parameter.numel())


def options(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group's entries that no update should change."""
    return {key: deepcopy(value) for key, value in group.items() if key not in SET_EVERY_STEP}


def equal(before: Any, now: Any) -> bool:
    """Whether two entries of a parameter group are the same."""
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return torch.equal(before, now)
    return bool(before == now)


def described(value: Any) -> str:
    """A value in short: the type and shape of a tensor, the value of anything else."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"the value {value!r:.60}"
