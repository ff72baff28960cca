"""An engine's fp32 weights and optimizer state, as logical tensors that any layout can read, one weight at a time.

A checkpoint names a weight ``model.NAME``, and the optimizer's tensors for it ``optim.TENSOR.NAME``, with the optimizer's own names
(hpclm.config.optimizers).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from hpclm.base.errors import ConfigError, ExitCode
from hpclm.config import OptimConfig
from hpclm.engine import SavedState, Shard
from hpclm.engine.save_plan import SavePlan
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.state_numbers import Numbers, decoded, encoded, gathered, is_number
from hpclm.optim.adamw import set_state, steps_by_group, steps_taken
from hpclm.optim.optimizers import kind_of
from hpclm.optim.user_optimizer import MatrixwiseOptimizer, UserOptimizer
from hpclm.parallel.mesh import SINGLE, SINGLE_MESH, Axis, Mesh
from hpclm.parallel.placement import Placement

SET_EVERY_STEP = ("params", "lr")
"""Entries of a parameter group that the engine sets in every step."""


Where = Literal["weight", "matrix", "everywhere"]


class UnsavableStateError(ConfigError):
    """The optimizer, or a block, keeps state that a checkpoint would leave out. Training shows it, so it is no invalid setting."""

    exit_code = ExitCode.DIVERGED


@dataclass(frozen=True)
class StateTensor:
    """A tensor in fp32 that an optimizer keeps for a weight."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    where: Where = "weight"
    """weight: a tensor with the weight's shape, split and replicated in the same way. matrix: a tensor of any shape, whole on the
    process that updates the matrix. everywhere: a tensor of any shape, equal on every process, each of which holds the whole weight."""


State = Mapping[str, StateTensor]
"""The optimizer's name of a tensor -> the tensor."""


def tensors_held(state: State, where: Where = "weight") -> dict[str, StateTensor]:
    """The tensors of ``state`` with this value of ``where``."""
    return {name: tensor for name, tensor in state.items() if tensor.where == where}


class TrainingState:
    """The state of an optimizer that updates ``ShardedParameter.parameter`` directly; subclasses handle a library's wrappers."""

    def __init__(self, optimizer: torch.optim.Optimizer, optim: OptimConfig, works_on: Collection[str] = ()):
        """``works_on``: names of the weights that this process updates as whole matrices."""
        self.optimizer = optimizer
        self.optim = optim
        self.works_on = works_on
        self.kind = kind_of(optim)
        self._groups = [options(group) for group in optimizer.param_groups]

    @property
    def users(self) -> bool:
        """Whether it is a user's optimizer. Its state is what it keeps after an update."""
        return isinstance(self.optimizer, UserOptimizer)

    @property
    def saves_groups(self) -> bool:
        """Whether numbers in parameter groups are saved: a user's optimizer may change them, but not once for each matrix."""
        return self.users and not isinstance(self.optimizer, MatrixwiseOptimizer)

    def is_matrix(self, weight: ShardedParameter) -> bool:
        """Whether one process updates the weight whole."""
        return bool(self.kind.matrices and self.kind.matrices(weight.placement))

    def key(self, weight: ShardedParameter) -> Tensor:
        """The parameter with the optimizer's state of a weight."""
        return weight.parameter

    def declared(self, weight: ShardedParameter) -> State:
        """The tensors that the optimizer keeps of a weight; for a user's optimizer, those that it keeps now."""
        if not weight.trained:
            return {}
        if not self.users:
            return dict.fromkeys(self.kind.state(weight.placement), StateTensor(weight.shape))
        shapes = tensor_shapes(self.optimizer.state.get(weight.parameter, {}))
        if self.is_matrix(weight):
            return {name: StateTensor(shape, "matrix") for name, shape in shapes.items()}
        local = tuple(weight.parameter.shape)
        like = {name: StateTensor(weight.shape) for name, shape in shapes.items() if shape == local}
        if local != weight.shape:  # of a part of a weight, only tensors that are divided like it are known to be right
            return like
        return {name: StateTensor(shape, "everywhere") for name, shape in shapes.items()} | like

    def saved(self, weight: ShardedParameter, shapes: Mapping[str, tuple[int, ...]]) -> State:
        """The tensors of a weight in a checkpoint that has tensors of these shapes for it."""
        if not self.users or not weight.trained:
            return {name: tensor for name, tensor in self.declared(weight).items() if name in shapes}
        if self.is_matrix(weight):
            return {name: StateTensor(shape, "matrix") for name, shape in shapes.items()}
        return {
            name: StateTensor(shape, "weight" if shape == weight.shape else "everywhere")
            for name, shape in shapes.items()
        }

    def local_part(self, weight: ShardedParameter) -> ShardedParameter:
        """``weight``, with the run of its values that this process keeps."""
        return weight

    def names(self, weight: ShardedParameter, where: Where = "weight") -> list[str]:
        """Names of the tensors that this process keeps for a weight; empty before its first update. ``where``: who holds the tensors."""
        kept = self.optimizer.state.get(weight.parameter, {})
        return [name for name in tensors_held(self.declared(weight), where) if name in kept]

    def values(self, weight: ShardedParameter, name: str | None = None) -> Tensor:
        """This process's values of a weight, or of the optimizer's tensor ``name`` for it."""
        return self.optimizer.state[weight.parameter][name] if name else weight.parameter.detach()

    def set(self, weight: ShardedParameter, values: Tensor) -> None:
        """Overwrite this process's values of a weight."""
        weight.parameter.detach().copy_(values)

    def gradient(self, weight: ShardedParameter) -> Tensor | None:
        """This process's values of a weight's gradient in the coming update; None if that update does not change the weight."""
        return weight.parameter.grad

    def steps(self) -> int:
        """Number of updates so far."""
        return steps_taken(self.optimizer)

    def owners(self, weights: Sequence[ShardedParameter]) -> Iterator[tuple[str, Tensor, State]]:
        """The keys of the optimizer's state: name, parameter, and the state that some process saves for it."""
        for weight in weights:
            yield weight.name, weight.parameter, self.declared(weight)

    def check(self, weights: Sequence[ShardedParameter]) -> None:
        """UnsavableStateError if the optimizer keeps state that a checkpoint would leave out."""
        kind = type(getattr(self.optimizer, "inner", self.optimizer))
        who = f"optim.name={self.optim.name} ({kind.__module__}.{kind.__qualname__})"
        row = "its row in hpclm/config/optimizers.py"
        for unkept in self.unkept(weights):
            raise UnsavableStateError(
                f"{who} keeps no {unkept}, which {row} declares, so no run could resume; correct the declaration, or create the tensor in the first update"
            )
        for unsaved in self.unsaved(weights):
            declared = sorted({name for weight in weights for name in self.declared(weight)})
            saved = f"{', '.join(declared) or 'no tensor'} of each weight, as declared in {row}, and a step count; declare the rest there"
            if self.users:
                saved = "fp32 tensors of a weight's shape, tensors of other shapes for whole weights, and numbers; keep the state in these"
            raise UnsavableStateError(
                f"{who} keeps {unsaved}; a checkpoint would leave it out. Checkpoints save {saved}, choose another optimizer, or set "
                "checkpoint.enabled=false"
            )

    def unsaved(self, weights: Sequence[ShardedParameter]) -> Iterator[str]:
        """Descriptions of the state that the optimizer keeps but a checkpoint would leave out."""
        owners = list(self.owners(weights))
        for name, parameter, declared in owners:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensor = declared.get(key)
                if self._saved_as_number(key, value):
                    continue
                shape = parameter.shape if tensor is None or tensor.where == "weight" else tensor.shape
                if tensor is None or not is_like(value, shape):
                    yield f"{key!r} of {name}, {described_value(value)}"
                elif tensor.where == "matrix" and name not in self.works_on:
                    yield f"{key!r} of {name}, {described_value(value)}, on a process that does not work on this matrix"
        parameters = {parameter for _, parameter, _ in owners}
        for key in self.optimizer.state.keys() - parameters:
            yield f"state of {described_value(key)}, which is not a weight"
        for changed in self._changed_in_groups():
            for key, value in changed.items():
                if not (self.saves_groups and is_number(value)):
                    yield f"{key!r} of a parameter group, {described_value(value)}, which its updates change"

    def _saved_as_number(self, key: Any, value: Any) -> bool:
        if self.users:
            return isinstance(key, str) and is_number(value)
        return key == "step" and is_count(value)  # saved once for all weights, as optimizer_steps

    def _changed_in_groups(self) -> list[dict[str, Any]]:
        """For each parameter group, the entries that updates have changed."""
        counters = {"step"} if steps_by_group(self.optimizer) else set()
        optimizer = self.optimizer.inner if isinstance(self.optimizer, MatrixwiseOptimizer) else self.optimizer
        return [
            {
                key: group[key]
                for key in group.keys() - counters - {*SET_EVERY_STEP}
                if key not in before or not equal(before[key], group[key])
            }
            for before, group in zip(self._groups, optimizer.param_groups, strict=True)
        ]

    def unkept(self, weights: Sequence[ShardedParameter]) -> Iterator[str]:
        """Descriptions of declared state that the optimizer does not keep: a checkpoint without it could not be loaded."""
        for weight in weights:
            kept = self.optimizer.state.get(weight.parameter)
            if not kept:
                continue
            for name, tensor in self.declared(weight).items():
                if name not in kept and (tensor.where != "matrix" or weight.name in self.works_on):
                    yield f"{name!r} of {weight.name}"

    def whole(
        self, weights: Sequence[ShardedParameter], states: Mapping[str, State], mesh: Mesh, least_mb: float
    ) -> list[SavePlan]:
        """Save plans of the optimizer's tensors that are not divided like their weights; each appears as a weight named TENSOR.WEIGHT.
        ``states``: the tensors of each weight. ``least_mb``: see SavePlan.among."""

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
                for name, tensor in tensors_held(states[weight.name], where).items()
            ]

        mine = [weight for weight in weights if weight.name in self.works_on]
        return [
            SavePlan.among(as_weights("everywhere", weights, mesh.dp), mesh, least_mb, 4),
            SavePlan.among(as_weights("matrix", mine, SINGLE), SINGLE_MESH),
        ]

    def tensors(self, plan: SavePlan, mesh: Mesh, least_mb: float) -> Iterator[Shard]:
        """The shards that this process saves. ``least_mb``: see SavePlan.among."""
        for number, weight in enumerate(plan.weights):
            yield from plan.shards(number, f"model.{weight.name}", self.values(weight))
            for name in self.names(weight):
                yield from plan.shards(number, f"optim.{name}.{weight.name}", self.values(weight, name))
        states = {weight.name: self.declared(weight) for weight in plan.weights}
        for whole in self.whole(plan.weights, states, mesh, least_mb):
            for number, tensor in enumerate(whole.weights):
                kept = self.optimizer.state.get(tensor.parameter, {})
                name = tensor.name.split(".")[0]
                if name in kept:
                    yield from whole.shards(number, f"optim.{tensor.name}", kept[name])

    def load(self, plan: SavePlan, mesh: Mesh, saved: SavedState, steps: int) -> None:
        """Load the weights, and the optimizer's tensors if the saved run made ``steps`` > 0 updates."""
        shapes = state_shapes(saved) if steps else {}
        states = {weight.name: self.saved(weight, shapes.get(weight.name, {})) for weight in plan.weights}
        for number, weight in enumerate(plan.weights):
            plan.load(number, f"model.{weight.name}", saved, weight.parameter)
            tensors = {name: torch.empty_like(weight.parameter) for name in tensors_held(states[weight.name])}
            for name, values in tensors.items():
                plan.load(number, f"optim.{name}.{weight.name}", saved, values)
            if weight.trained:
                set_state(self.optimizer, weight.parameter, tensors if steps else None, steps)
        for whole in self.whole(plan.weights, states, mesh, 0.0):
            for number, tensor in enumerate(whole.weights):
                values = tensor.parameter.new_empty(tensor.shape)
                whole.load(number, f"optim.{tensor.name}", saved, values)
                self.optimizer.state[tensor.parameter][tensor.name.split(".")[0]] = values

    def numbers(self, weights: Sequence[ShardedParameter], world: Axis) -> dict[str, Numbers]:
        """The numbers that a user's optimizer keeps of weights and changes in parameter groups (hpclm.engine.state_numbers); a collective."""
        groups = {}
        if self.saves_groups:
            for group, changed in zip(self.optimizer.param_groups, self._changed_in_groups(), strict=True):
                groups.update(dict.fromkeys(group["params"], changed))
        found = {}
        for weight in weights:
            key = self.key(weight)
            kept = {
                "state": encoded(self.optimizer.state.get(key, {}), key.device),
                "group": encoded(groups.get(key, {}), key.device),
            }
            if any(kept.values()):
                found[weight.name] = kept
        return gathered(found, world)

    def check_numbers(self, weights: Sequence[ShardedParameter], saved: Mapping[str, Numbers]) -> None:
        """ConfigError if saved numbers have no place in this layout."""
        together: dict[Tensor, Mapping[str, Any]] = {}
        for weight in weights:
            numbers = saved.get(weight.name)
            if numbers and not self.saves_groups and numbers["group"]:
                raise ConfigError(
                    f"the checkpoint has {', '.join(numbers['group'])} of optim.name={self.optim.name}'s parameter groups, which cannot be resumed "
                    "with these settings of the engine; resume with those of the run that saved it"
                )
            if numbers and together.setdefault(self.key(weight), numbers["state"]) != numbers["state"]:
                raise ConfigError(
                    f"the checkpoint has {numbers['state']} for {weight.name}, and other numbers for weights that this engine updates together "
                    "with it; resume with another engine"
                )

    def load_numbers(self, weights: Sequence[ShardedParameter], saved: Mapping[str, Numbers]) -> None:
        """Set the numbers of a user's optimizer to the saved ones; those that are not saved, to their values before the first update."""
        groups = {}
        for weight in weights:
            key = self.key(weight)
            if weight.name in saved:
                groups[key] = saved[weight.name]["group"]
                if not self.is_matrix(weight) or weight.name in self.works_on:
                    self.optimizer.state[key].update(decoded(saved[weight.name]["state"], key.device))
        for before, group in zip(self._groups, self.optimizer.param_groups if self.saves_groups else (), strict=False):
            for name in group.keys() - before.keys() - {*SET_EVERY_STEP}:  # created by an update
                del group[name]
            group.update(deepcopy(before))
            # another layout, or other optim.groups, has other groups, of which one may have no weight here
            of_members = (groups[parameter] for parameter in group["params"] if parameter in groups)
            numbers = next(of_members, next((entry["group"] for entry in saved.values()), {}))
            device = group["params"][0].device if group["params"] else torch.device("cpu")
            group.update(decoded(numbers, device))


def state_shapes(saved: SavedState) -> dict[str, dict[str, tuple[int, ...]]]:
    """For each weight in a checkpoint, the shapes of the optimizer's tensors by name."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in saved.shapes().items():
        if name.startswith("optim."):
            _, tensor, weight = name.split(".", 2)
            shapes.setdefault(weight, {})[tensor] = tuple(shape)
    return shapes


def tensor_shapes(kept: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in the state of a parameter, without numbers. A checkpoint cannot have names with a dot."""
    return {
        key: tuple(value.shape)
        for key, value in kept.items()
        if isinstance(key, str) and "." not in key and isinstance(value, Tensor) and value.ndim
    }


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
