"""An engine's fp32 weights and optimizer state, as logical tensors that any layout can read, one weight at a time.

A checkpoint names a weight ``model.NAME``, and the optimizer's tensors for it ``optim.TENSOR.NAME``, with the optimizer's own names
(hpclm.config.optimizers).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.config import OptimConfig
from hpclm.config.optimizers import State, Where, tensors_held
from hpclm.engine import SavedState, Shard
from hpclm.engine.save_plan import SavePlan
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.optim.adamw import set_state, steps_by_group, steps_taken
from hpclm.optim.optimizers import kind_of
from hpclm.optim.user_optimizer import UserOptimizer
from hpclm.parallel.collectives import all_gather_objects
from hpclm.parallel.mesh import SINGLE, SINGLE_MESH, Axis, Mesh
from hpclm.parallel.placement import Placement

SET_EVERY_STEP = ("params", "lr")
"""Entries of a parameter group that the engine sets in every step."""


class UnsavableStateError(ConfigError):
    """The optimizer keeps state that a checkpoint would leave out."""


class TrainingState:
    """The state of an optimizer that updates ``ShardedParameter.parameter`` directly; subclasses handle a library's wrappers."""

    def __init__(self, optimizer: torch.optim.Optimizer, optim: OptimConfig, works_on: Collection[str] = ()):
        """``works_on``: names of the weights that this process updates as whole matrices."""
        self.optimizer = optimizer
        self.optim = optim
        self.works_on = works_on
        self.kind = kind_of(optim)
        self._groups = [options(group) for group in optimizer.param_groups]

    def declared(self, name: str, shape: Sequence[int]) -> State:
        """The tensors that the optimizer keeps of a weight with this name and shape."""
        return self.kind.state(name, shape, self.optim)

    def local_part(self, weight: ShardedParameter) -> ShardedParameter:
        """``weight``, with the run of its values that this process keeps."""
        return weight

    def names(self, weight: ShardedParameter, where: Where = "weight") -> list[str]:
        """Names of the tensors that this process keeps for a weight; empty before its first update. ``where``: who holds the tensors."""
        kept = self.optimizer.state.get(weight.parameter, {})
        return [name for name in tensors_held(self.declared(weight.name, weight.shape), where) if name in kept]

    def values(self, weight: ShardedParameter, name: str | None = None) -> Tensor:
        """This process's values of a weight, or of the optimizer's tensor ``name`` for it."""
        return self.optimizer.state[weight.parameter][name] if name else weight.parameter.detach()

    def gradient(self, weight: ShardedParameter) -> Tensor | None:
        """This process's values of a weight's gradient in the coming update; None if that update does not change the weight."""
        return weight.parameter.grad

    def steps(self) -> int:
        """Number of updates so far."""
        return steps_taken(self.optimizer)

    def owners(self, weights: Sequence[ShardedParameter]) -> Iterator[tuple[str, Tensor, State]]:
        """The keys of the optimizer's state: name, parameter, and the state that some process saves for it."""
        for weight in weights:
            yield weight.name, weight.parameter, self.declared(weight.name, weight.shape)

    def check(self, weights: Sequence[ShardedParameter]) -> None:
        """UnsavableStateError if the optimizer keeps state that a checkpoint would leave out."""
        kind = type(getattr(self.optimizer, "inner", self.optimizer))
        users = isinstance(self.optimizer, UserOptimizer)
        place = "its attribute state_tensors" if users else "its row in hpclm/config/optimizers.py"
        who = f"optim.name={self.optim.name} ({kind.__module__}.{kind.__qualname__})"
        if isinstance(self.optimizer, UserOptimizer) and self.optimizer.lost:
            raise UnsavableStateError(
                f"{who} keeps {self.optimizer.lost} outside of its state: the updates of a resumed run would differ. Keep tensors in "
                "self.state[parameter] and numbers in the parameter groups, or set checkpoint.enabled=false"
            )
        for unkept in self.unkept(weights):
            raise UnsavableStateError(
                f"{who} keeps no {unkept}, which {place} declares, so no run could resume; correct the declaration, or create the tensor in the first update"
            )
        for unsaved in self.unsaved(weights):
            declared = {name for weight in weights for name in self.declared(weight.name, weight.shape)}
            raise UnsavableStateError(
                f"{who} keeps {unsaved}; a checkpoint would leave it out. Checkpoints save {', '.join(sorted(declared)) or 'no tensor'} of each weight, "
                f"as declared in {place} (contiguous and in fp32), and a step count; declare the rest there, choose another optimizer, or set "
                "checkpoint.enabled=false"
            )

    def unsaved(self, weights: Sequence[ShardedParameter]) -> Iterator[str]:
        """Descriptions of the state that the optimizer keeps but a checkpoint would leave out."""
        owners = list(self.owners(weights))
        for name, parameter, declared in owners:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensor = declared.get(key)
                # saved once for all weights, as optimizer_steps
                if key == "step" and is_count(value):
                    continue
                shape = parameter.shape if tensor is None or tensor.where == "weight" else tensor.shape
                if tensor is None or not is_like(value, shape):
                    yield f"{key!r} of {name}, {described_value(value)}"
                elif tensor.where == "matrix" and name not in self.works_on:
                    yield f"{key!r} of {name}, {described_value(value)}, on a process that does not work on this matrix"
        states = self.optimizer.state.values() if isinstance(self.optimizer, UserOptimizer) else ()
        counts = {float(entry["step"]) for entry in states if "step" in entry}
        if len(counts) > 1:
            yield f"{min(counts):.0f} to {max(counts):.0f} as 'step' of different weights, but a checkpoint stores one count"
        parameters = {parameter for _, parameter, _ in owners}
        for key in self.optimizer.state.keys() - parameters:
            yield f"state of {described_value(key)}, which is not a weight"
        counters = {"step"} if steps_by_group(self.optimizer) else set()
        for before, group in zip(self._groups, self.optimizer.param_groups, strict=True):
            for key in group.keys() - counters - {*SET_EVERY_STEP}:
                unchanged = key in before and equal(before[key], group[key])
                if not (unchanged or (key in self.kind.group_state and is_count(group[key]))):
                    yield f"{key!r} of a parameter group, {described_value(group[key])}, which its updates change"

    def unkept(self, weights: Sequence[ShardedParameter]) -> Iterator[str]:
        """Descriptions of declared state that the optimizer does not keep: a checkpoint without it could not be loaded."""
        for weight in weights:
            kept = self.optimizer.state.get(weight.parameter)
            if not kept:
                continue
            for name, tensor in self.declared(weight.name, weight.shape).items():
                if name not in kept and (tensor.where != "matrix" or weight.name in self.works_on):
                    yield f"{name!r} of {weight.name}"

    def whole(self, weights: Sequence[ShardedParameter], mesh: Mesh, least_mb: float) -> list[SavePlan]:
        """Save plans of the optimizer's tensors that are not divided like their weights; each appears as a weight named TENSOR.WEIGHT.
        ``least_mb``: see SavePlan.among."""

        def as_weights(where: Where, weights: Sequence[ShardedParameter], replicas: Axis) -> list[ShardedParameter]:
            return [
                replace(
                    weight,
                    name=f"{name}.{weight.name}",
                    placement=Placement(tensor.shape),
                    begin=0,
                    values=prod(tensor.shape),
                    replicas=replicas,
                )
                for weight in weights
                for name, tensor in tensors_held(self.declared(weight.name, weight.shape), where).items()
            ]

        mine = [weight for weight in weights if weight.name in self.works_on]
        return [
            SavePlan.among(as_weights("everywhere", weights, mesh.dp), mesh, least_mb, 4),
            SavePlan.among(as_weights("matrix", mine, SINGLE), SINGLE_MESH),
        ]

    def tensors(self, plan: SavePlan, whole: Sequence[SavePlan]) -> Iterator[Shard]:
        """The shards that this process saves."""
        for number, weight in enumerate(plan.weights):
            yield from plan.shards(number, f"model.{weight.name}", self.values(weight))
            for name in self.names(weight):
                yield from plan.shards(number, f"optim.{name}.{weight.name}", self.values(weight, name))
        for plan in whole:
            for number, tensor in enumerate(plan.weights):
                kept = self.optimizer.state.get(tensor.parameter, {})
                name = tensor.name.split(".")[0]
                if name in kept:
                    yield from plan.shards(number, f"optim.{tensor.name}", kept[name])

    def load(self, plan: SavePlan, whole: Sequence[SavePlan], saved: SavedState, steps: int) -> None:
        """Load the weights, and the optimizer's state if the saved run made ``steps`` > 0 updates."""
        given = saved.shapes() if steps else {}
        for number, weight in enumerate(plan.weights):
            plan.load(number, f"model.{weight.name}", saved, weight.parameter)
            declared = self.declared(weight.name, weight.shape)
            kept = [name for name in declared if f"optim.{name}.{weight.name}" in given]
            tensors = {name: torch.empty_like(weight.parameter) for name in kept if declared[name].where == "weight"}
            for name, values in tensors.items():
                plan.load(number, f"optim.{name}.{weight.name}", saved, values)
            set_state(self.optimizer, weight.parameter, tensors if steps else None, steps)
        for plan in whole:
            for number, tensor in enumerate(plan.weights):
                if f"optim.{tensor.name}" in given:
                    values = tensor.parameter.new_empty(tensor.shape)
                    plan.load(number, f"optim.{tensor.name}", saved, values)
                    key = tensor.name.split(".")[0]
                    if isinstance(self.optimizer, UserOptimizer):
                        values = self.optimizer.place(tensor.parameter, key, values)
                    self.optimizer.state[tensor.parameter][key] = values

    def group_numbers(self, weights: Sequence[ShardedParameter], pp: Axis) -> list[dict[str, Any]]:
        """The numbers in parameter groups that updates change, for each set of weights with equal numbers, on all stages; a collective."""
        names = {weight.parameter: weight.name for weight in weights}
        groups = [
            (
                [names[p] for p in group["params"]],
                {key: number(group[key]) for key in self.kind.group_state if key in group},
            )
            for group in self.optimizer.param_groups
        ]
        # by the names of weights, not by the groups' indices: another layout, or other optim.groups, has other groups
        entries: dict[str, dict[str, Any]] = {}
        for members, numbers in (group for stage in all_gather_objects(groups, pp) for group in stage if group[0]):
            entries.setdefault(repr(numbers), {"weights": [], "numbers": numbers})["weights"] += members
        return list(entries.values())

    def load_groups(self, weights: Sequence[ShardedParameter], saved: Sequence[Mapping[str, Any]]) -> None:
        """Set the numbers of parameter groups to the saved ones; without saved ones, to their values before the first update."""
        names = {weight.parameter: weight.name for weight in weights}
        numbers = {name: entry["numbers"] for entry in saved for name in entry["weights"]}
        for before, group in zip(self._groups, self.optimizer.param_groups, strict=True):
            saved_of_members = (numbers[names[p]] for p in group["params"] if names[p] in numbers)
            entry = next(saved_of_members, saved[0]["numbers"] if saved else before)
            for key in self.kind.group_state:
                now = group.get(key)
                if key in entry:
                    group[key] = torch.full_like(now, entry[key]) if isinstance(now, Tensor) else entry[key]
                elif key not in before:  # created by an update
                    group.pop(key, None)


def is_count(value: Any) -> bool:
    """Whether ``value`` is a step count."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float))


def is_like(value: Any, shape: Sequence[int]) -> bool:
    """Whether ``value`` is a contiguous fp32 tensor of this shape, so that loading restores its bits and memory layout. A tensor that
    DeepSpeed keeps on disk has no values now."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or not value.is_contiguous():
        return False
    return tuple(value.shape) == tuple(shape) or 0 in (value.numel(), prod(shape))


def number(value: Any) -> Any:
    """A number of a parameter group, as JSON."""
    return value.item() if isinstance(value, Tensor) else value


def options(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of the entries of a parameter group that no update should change."""
    return {key: deepcopy(value) for key, value in group.items() if key not in SET_EVERY_STEP}


def equal(before: Any, now: Any) -> bool:
    """Whether two entries of a parameter group are equal."""
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return torch.equal(before, now)
    return bool(before == now)


def described_value(value: Any) -> str:
    """A short description of a value: type and shape of a tensor, otherwise the value itself."""
    if isinstance(value, Tensor):
        order = "" if value.is_contiguous() else ", which is not contiguous"
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}{order}"
    return f"the value {value!r:.60}"
