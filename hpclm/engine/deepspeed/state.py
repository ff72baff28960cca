"""fp32 weights and optimizer state inside DeepSpeed's optimizers, as logical tensors: read and written one weight at a time.

Uses documented functions (``safe_get_local_*``) where they exist, and otherwise attributes without an underscore.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from deepspeed import utils
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from torch import Tensor, nn

from hpclm.base.errors import ConfigError
from hpclm.config import OptimConfig
from hpclm.engine import SavedState
from hpclm.engine.save_plan import SavePlan
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.state import State, StateTensor, TrainingState, Where, state_shapes, tensor_shapes, tensors_held
from hpclm.optim.adamw import set_state
from hpclm.optim.user_optimizer import UserOptimizer
from hpclm.parallel.mesh import Axis, Mesh
from hpclm.parallel.placement import Placement


class PartitionedState(TrainingState, ABC):
    """State of DeepSpeed's ZeRO optimizer ``wrapper``, which gives hpclm's ``optimizer`` flat partitions as parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, optim: OptimConfig, flat: Sequence[Tensor]):
        """``flat``: this process's partitions, the keys of the optimizer's state."""
        super().__init__(optimizer, optim)
        self.flat = flat
        if isinstance(optimizer, UserOptimizer) and optimizer.initial:
            raise ConfigError(
                f"optim.name={optim.name} has state before its first update, which DeepSpeed's partitions would lack; choose another engine"
            )
        self.begin(0, ())

    @abstractmethod
    def size(self, weight: ShardedParameter) -> int:
        """Number of a weight's values in this process's partition, padding included."""

    @abstractmethod
    def place(self, weight: ShardedParameter) -> tuple[Tensor, slice]:
        """The partition that holds this process's values of a weight, and their slice in it."""

    def gradient(self, weight: ShardedParameter) -> Tensor | None:
        """See TrainingState.gradient. DeepSpeed updates one partition after another, and scales and clips only the current one."""
        if not weight.trained:
            return None
        flat, place = self.place(weight)
        updated = any(flat is partition for group in self.optimizer.param_groups for partition in group["params"])
        if not updated or flat.grad is None:
            return None
        return flat.grad[place]

    @abstractmethod
    def set(self, weight: ShardedParameter, values: Tensor, name: str | None = None) -> None:
        """Overwrite this process's values of a weight, or of the optimizer's tensor ``name`` for it."""

    @abstractmethod
    def publish(self) -> None:
        """Copy the optimizer's fp32 weights into the model."""

    @property
    def saves_groups(self) -> bool:
        """See TrainingState.saves_groups; DeepSpeed's groups have no weights."""
        return False

    def key(self, weight: ShardedParameter) -> Tensor:
        """The partition with the optimizer's state of a weight."""
        return self.place(weight)[0]

    def declared(self, weight: ShardedParameter) -> State:
        """The tensors that the optimizer keeps of a weight."""
        return self._kept(self.key(weight), weight.placement) if weight.trained else {}

    def _kept(self, flat: Tensor, placement: Placement) -> State:
        """The tensors that the optimizer keeps of a partition, as those of a weight."""
        kept = tensor_shapes(self.optimizer.state.get(flat, {})) if self.users else self.kind.state(placement)
        return dict.fromkeys(kept, StateTensor(placement.shape))

    def names(self, weight: ShardedParameter, where: Where = "weight") -> list[str]:
        """Names of the tensors that the optimizer keeps of a weight; empty before the first update."""
        return list(tensors_held(self.declared(weight), where)) if self.steps() else []

    def owners(self, weights: Sequence[ShardedParameter]) -> Iterator[tuple[str, Tensor, State]]:
        """The keys of the optimizer's state: DeepSpeed's partitions."""
        for number, flat in enumerate(self.flat):
            yield f"partition {number}", flat, self._kept(flat, Placement(tuple(flat.shape)))

    def load(self, plan: SavePlan, mesh: Mesh, saved: SavedState, steps: int) -> None:
        """Load the weights, and the optimizer's state if the saved run made ``steps`` > 0 updates."""
        shapes = state_shapes(saved) if steps else {}
        states = [self.saved(weight, shapes.get(weight.name, {})) for weight in plan.weights]
        if steps or self.steps():
            self.begin(steps, {name for state in states for name in tensors_held(state)})
        for number, (weight, state) in enumerate(zip(plan.weights, states, strict=True)):
            for name in (None, *tensors_held(state)):  # tensors that were not saved stay zero
                values = torch.empty(self.size(weight), device=weight.parameter.device)
                plan.load(number, f"optim.{name}.{weight.name}" if name else f"model.{weight.name}", saved, values)
                self.set(weight, values, name)

    def begin(self, steps: int, names: Collection[str]) -> None:
        """Zero the state, tensors of these ``names`` for a user's optimizer, and set the step count to ``steps`` in all partitions; DeepSpeed
        itself links only the state of the first."""
        for flat in self.flat:
            declared = names if self.users else self.kind.state(Placement(tuple(flat.shape)))
            self.begin_partition(flat, steps, declared)

    def begin_partition(self, flat: Tensor, steps: int, names: Collection[str]) -> None:
        """Zero the state of one partition, and set its step count."""
        set_state(self.optimizer, flat, {name: torch.zeros_like(flat) for name in names}, steps)


class PartitionedOptimizer(PartitionedState):
    """ZeRO stages 1 and 2. DeepSpeed makes the weights of a parameter group views of one flat buffer. Each replica's equal part of the
    buffer, in fp32, is the only parameter of that group in hpclm's optimizer."""

    def __init__(
        self,
        wrapper: Any,
        optimizer: torch.optim.Optimizer,
        optim: OptimConfig,
        groups: Sequence[Sequence[nn.Parameter]],
        dp: Axis,
    ):
        """``groups``: the weights of the optimizer's groups before DeepSpeed replaced them. ``dp``: the ranks with the other partitions."""
        self.wrapper = wrapper
        flats = [group["params"][0] for group in optimizer.param_groups]
        self.places: dict[nn.Parameter, tuple[int, Tensor, slice]] = {}
        """For each weight: index of its first value in this process's partition, the partition, and the slice there."""
        for flat, weights in zip(flats, groups, strict=True):
            size = flat.numel()
            for weight in weights:
                # the layout of DeepSpeed 0.19; with another one, a checkpoint would silently mix up weights
                if weight.untyped_storage().nbytes() != dp.size * size * weight.element_size():
                    raise RuntimeError(
                        "this version of DeepSpeed partitions weights in an unknown way; install DeepSpeed 0.19"
                    )
                start = weight.storage_offset() - dp.rank * size  # index in this partition
                low, high = (min(max(index, 0), size) for index in (start, start + weight.numel()))
                self.places[weight] = low - start if low < high else 0, flat, slice(low, high)
        super().__init__(optimizer, optim, flats)

    def local_part(self, weight: ShardedParameter) -> ShardedParameter:
        """``weight``, with the run of its values in this process's partition."""
        if not weight.trained:
            return weight
        return replace(weight, begin=self.places[weight.parameter][0], values=self.size(weight))

    def size(self, weight: ShardedParameter) -> int:
        """Number of a weight's values in this process's partition."""
        return self.values(weight).numel()

    def place(self, weight: ShardedParameter) -> tuple[Tensor, slice]:
        """The partition that holds this process's values of a weight, and their slice in it."""
        return self.places[weight.parameter][1:]

    def values(self, weight: ShardedParameter, name: str | None = None) -> Tensor:
        """A view of this process's values of a weight, or of the optimizer's tensor ``name`` for it."""
        if not weight.trained:
            return weight.parameter.detach().view(-1)
        flat, place = self.place(weight)
        return (self.optimizer.state[flat][name] if name else flat.detach())[place]

    def set(self, weight: ShardedParameter, values: Tensor, name: str | None = None) -> None:
        """Overwrite this process's values of one tensor."""
        self.values(weight, name).copy_(values)

    def publish(self) -> None:
        """Copy the optimizer's fp32 weights into the model."""
        self.wrapper.update_lp_params()


class PartitionedWeights(PartitionedState):
    """ZeRO stage 3. Every replica has an equal part, ``ds_tensor``, of each weight, with padding. hpclm's optimizer gets the fp32 partitions
    one at a time, from ``fp32_partitioned_groups_flat``."""

    def __init__(self, wrapper: Any, optimizer: torch.optim.Optimizer, optim: OptimConfig, shard: Axis):
        """``shard``: the axis of the replicas."""
        self.wrapper = wrapper
        self.shard = shard
        super().__init__(optimizer, optim, wrapper.fp32_partitioned_groups_flat)

    def local_part(self, weight: ShardedParameter) -> ShardedParameter:
        """``weight``, with the run of its values in this process's partition."""
        begin = self.shard.rank * self.size(weight)
        whole: int = weight.parameter.ds_numel  # type: ignore[attr-defined]
        return replace(weight, begin=begin, values=min(max(0, whole - begin), self.size(weight)))

    def size(self, weight: ShardedParameter) -> int:
        """Number of a weight's values in this process's partition, padding included."""
        return int(weight.parameter.ds_tensor.ds_numel)  # type: ignore[attr-defined]

    def place(self, weight: ShardedParameter) -> tuple[Tensor, slice]:
        """The partition that holds this process's values of a weight, and their slice in it."""
        number, first, count = self.wrapper.grad_position[self.wrapper.get_param_id(weight.parameter)]
        return self.flat[number], slice(first, first + count)

    def values(self, weight: ShardedParameter, name: str | None = None) -> Tensor:
        """This process's values of a weight, or of the optimizer's tensor ``name`` for it."""
        if not weight.trained:
            return weight.parameter.ds_tensor.detach()  # type: ignore[attr-defined]
        # with state on disk, the next tensor is read into the buffer of this one
        if self.wrapper.swap_optimizer:
            if name:
                return utils.safe_get_local_optimizer_state(weight.parameter, name).clone()
            return utils.safe_get_local_fp32_param(weight.parameter).clone()
        # not through utils, which copy offloaded values to the device
        flat, place = self.place(weight)
        return (self.optimizer.state[flat][name] if name else flat.detach())[place]

    def set(self, weight: ShardedParameter, values: Tensor, name: str | None = None) -> None:
        """Overwrite this process's values of one tensor."""
        parameter: Any = weight.parameter
        if name:
            utils.safe_set_local_optimizer_state(parameter, values, name)
            return
        if weight.trained:
            utils.safe_set_local_fp32_param(parameter, values)
        if parameter.ds_tensor.status == PartitionedParamStatus.AVAILABLE:
            parameter.ds_tensor.data.copy_(values)
        else:  # the weight is on disk
            parameter.nvme_swapper.swap_out_partitioned_params(dst_fp16_params=[parameter], src_fp32_params=[values])

    def publish(self) -> None:
        """Gather the weights that DeepSpeed keeps gathered, and invalidate hpZ's copies."""
        # hpZ's copies (a second partition inside a node) still hold the old weights
        self.wrapper.invalidate_secondary_tensor()
        kept = self.wrapper.persistent_parameters
        if kept:
            kept[0].all_gather(kept)

    def begin_partition(self, flat: Tensor, steps: int, names: Collection[str]) -> None:
        """Zero the state of one partition and set its step count to ``steps``."""
        wrapper = self.wrapper
        swapper = wrapper.optimizer_swapper if wrapper.swap_optimizer else None
        # DeepSpeed's record of the sizes, because a partition in memory may be empty
        sizes = dict(zip(self.flat, wrapper.fp16_partitioned_groups_flat_numel, strict=True))
        if swapper is None or not swapper.is_swappable_tensor(numel=sizes[flat]):
            super().begin_partition(flat, steps, names)
        elif steps or self.steps():  # otherwise the first update allocates the state on disk
            swapper.swap_in_optimizer_state(flat, None)
            super().begin_partition(flat, steps, names)
            swapper.swap_out_optimizer_state(flat, False)
