"""fp32 weights and moments inside DeepSpeed's optimizers, as logical tensors: read and written a weight at a time.

By what DeepSpeed documents (``safe_get_local_*``), and where there is nothing, by attributes without an underscore.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from deepspeed import utils
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from torch import Tensor, nn

from hpclm.config import RunConfig
from hpclm.engine import DeviceResult, SavedState, Shard, StepResult
from hpclm.engine.base import MOMENTS
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.sharing import Sharing
from hpclm.model.stack import Stack, check_shapes
from hpclm.optim.scaler import LossScale
from hpclm.parallel.mesh import Axis, Mesh


class State(ABC):
    """The state of DeepSpeed's ZeRO optimizer around ``optimizer``, ours, whose parameters are flat partitions."""

    def __init__(self, optimizer: torch.optim.Optimizer, flat: Sequence[Tensor]):
        """``flat``: this process's partitions, the keys of the optimizer's state."""
        self.optimizer, self.flat = optimizer, flat
        self.by_group = type(optimizer).__module__.startswith(
            "apex"
        )  # apex counts steps per group, others per parameter
        self.begin(0)

    @abstractmethod
    def run(self, weight: ShardedParameter) -> ShardedParameter:
        """``weight``, with the run of its values that is in this process's partition."""

    @abstractmethod
    def size(self, weight: ShardedParameter) -> int:
        """How many values of a weight are in this process's partition, with padding."""

    @abstractmethod
    def values(self, weight: ShardedParameter, moment: str | None = None) -> Tensor:
        """This process's values of a weight, or of one of its moments."""

    @abstractmethod
    def set(self, weight: ShardedParameter, values: Tensor, moment: str | None) -> None:
        """Write this process's values of one tensor."""

    @abstractmethod
    def publish(self) -> None:
        """Copy the optimizer's fp32 weights into the model."""

    def steps(self) -> int:
        """Updates so far."""
        counting = self.optimizer.param_groups if self.by_group else self.optimizer.state.values()
        return max((int(state["step"]) for state in counting if "step" in state), default=0)

    def tensors(self, sharing: Sharing) -> Iterator[Shard]:
        """The shards that this process saves."""
        moments = MOMENTS if self.steps() else ()
        for number, weight in enumerate(sharing.weights):
            yield from sharing.shards(number, f"model.{weight.name}", self.values(weight))
            for moment in moments:
                yield from sharing.shards(number, f"optim.{moment}.{weight.name}", self.values(weight, moment))

    def load(self, sharing: Sharing, saved: SavedState, steps: int) -> None:
        """Load the weights, and the moments if there were ``steps`` updates."""
        if steps or self.steps():
            self.begin(steps)
        for number, weight in enumerate(sharing.weights):
            for moment in (None, *(MOMENTS if steps else ())):
                values = torch.empty(self.size(weight), device=weight.parameter.device)
                name = f"optim.{moment}.{weight.name}" if moment else f"model.{weight.name}"
                sharing.load(number, name, saved, values)
                self.set(weight, values, moment)
        self.publish()

    def begin(self, steps: int) -> None:
        """Set the moments to 0 and the step count to ``steps``: of all partitions, since DeepSpeed links none but the first's."""
        for flat in self.flat:
            self.begin_partition(flat, steps)
        if self.by_group:
            for group in self.optimizer.param_groups:
                group["step"] = steps

    def begin_partition(self, flat: Tensor, steps: int) -> None:
        """The same for one partition."""
        tensor = isinstance(self.optimizer, torch.optim.AdamW)
        counted = {"step": torch.tensor(float(steps), device=flat.device) if tensor else steps}
        moments = {moment: torch.zeros_like(flat) for moment in MOMENTS}
        self.optimizer.state[flat] = moments if self.by_group else {**counted, **moments}


class PartitionedOptimizer(State):
    """Stages 1 and 2. DeepSpeed makes the weights of a parameter group views of one flat buffer, and an equal part of it, in fp32,
    the only parameter of that group in our optimizer."""

    def __init__(
        self, wrapper: Any, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[nn.Parameter]], dp: Axis
    ):
        """``groups``: the weights of the optimizer's groups, before DeepSpeed replaced them. ``dp``: has the other parts."""
        self.wrapper = wrapper
        flats = [group["params"][0] for group in optimizer.param_groups]
        self.places: dict[nn.Parameter, tuple[int, Tensor, slice]] = {}
        """Of each weight: the index of the first value in this process's partition, the partition, and its values there."""
        for flat, weights in zip(flats, groups, strict=True):
            size = flat.numel()
            for weight in weights:
                if weight.untyped_storage().nbytes() != dp.size * size * weight.element_size():
                    raise RuntimeError("this version of DeepSpeed partitions weights in a way that hpclm does not know")
                start = weight.storage_offset() - dp.rank * size  # in this partition
                low, high = (min(max(index, 0), size) for index in (start, start + weight.numel()))
                self.places[weight] = low - start if low < high else 0, flat, slice(low, high)
        super().__init__(optimizer, flats)

    def run(self, weight: ShardedParameter) -> ShardedParameter:
        """``weight``, with the run of its values that is in this process's partition."""
        return replace(weight, begin=self.places[weight.parameter][0], values=self.size(weight))

    def size(self, weight: ShardedParameter) -> int:
        """How many values of a weight are in this process's partition."""
        return self.values(weight).numel()

    def values(self, weight: ShardedParameter, moment: str | None = None) -> Tensor:
        """This process's values of a weight, or of one of its moments: a view."""
        _, flat, place = self.places[weight.parameter]
        return (self.optimizer.state[flat][moment] if moment else flat.detach())[place]

    def set(self, weight: ShardedParameter, values: Tensor, moment: str | None) -> None:
        """Write this process's values of one tensor."""
        self.values(weight, moment).copy_(values)

    def publish(self) -> None:
        """Copy the optimizer's fp32 weights into the model."""
        self.wrapper.update_lp_params()


class PartitionedWeights(State):
    """Stage 3. Of each weight, every replica has an equal part, ``ds_tensor``, with padding; our optimizer gets the fp32 partitions, one
    at a time, from ``fp32_partitioned_groups_flat``."""

    def __init__(self, wrapper: Any, optimizer: torch.optim.Optimizer, shard: Axis):
        """``shard``: the replicas."""
        self.wrapper, self.shard = wrapper, shard
        super().__init__(optimizer, wrapper.fp32_partitioned_groups_flat)

    def run(self, weight: ShardedParameter) -> ShardedParameter:
        """``weight``, with the run of its values that is in this process's partition."""
        begin = self.shard.rank * self.size(weight)
        whole: int = weight.parameter.ds_numel  # type: ignore[attr-defined]
        return replace(weight, begin=begin, values=min(max(0, whole - begin), self.size(weight)))

    def size(self, weight: ShardedParameter) -> int:
        """How many values of a weight are in this process's partition, with padding."""
        return int(weight.parameter.ds_tensor.ds_numel)  # type: ignore[attr-defined]

    def values(self, weight: ShardedParameter, moment: str | None = None) -> Tensor:
        """This process's values of a weight, or of one of its moments."""
        parameter = weight.parameter
        if moment:
            values = utils.safe_get_local_optimizer_state(parameter, moment)
        else:
            values = utils.safe_get_local_fp32_param(parameter)
        return (
            values.clone() if self.wrapper.swap_optimizer else values
        )  # the next one is read from disk to where this one was

    def set(self, weight: ShardedParameter, values: Tensor, moment: str | None) -> None:
        """Write this process's values of one tensor."""
        parameter: Any = weight.parameter
        if moment:
            utils.safe_set_local_optimizer_state(parameter, values, moment)
            return
        utils.safe_set_local_fp32_param(parameter, values)
        if parameter.ds_tensor.status == PartitionedParamStatus.AVAILABLE:
            parameter.ds_tensor.data.copy_(values)
        else:  # on disk
            parameter.nvme_swapper.swap_out_partitioned_params(dst_fp16_params=[parameter], src_fp32_params=[values])

    def load(self, sharing: Sharing, saved: SavedState, steps: int) -> None:
        """Load the weights, and the moments if there were ``steps`` updates."""
        self.wrapper.parameter_offload.partition_all_parameters()  # what is set must not be gathered now
        super().load(sharing, saved, steps)

    def publish(self) -> None:
        """Gather what DeepSpeed keeps gathered, and forget hpZ's copies of the weights."""
        self.wrapper.invalidate_secondary_tensor()
        if kept := self.wrapper.persistent_parameters:
            kept[0].all_gather(kept)

    def begin_partition(self, flat: Tensor, steps: int) -> None:
        """Set the moments of one partition to 0 and its step count to ``steps``."""
        wrapper = self.wrapper
        swapper = wrapper.optimizer_swapper if wrapper.swap_optimizer else None
        sizes = dict(
            zip(self.flat, wrapper.fp16_partitioned_groups_flat_numel, strict=True)
        )  # in memory it may be empty
        if swapper is None or not swapper.is_swappable_tensor(numel=sizes[flat]):
            super().begin_partition(flat, steps)
        elif steps or self.steps():  # otherwise the first update allocates them on the disk
            swapper.swap_in_optimizer_state(flat, None)
            super().begin_partition(flat, steps)
            swapper.swap_out_optimizer_state(flat, False)


class Wrapped:
    """What the engines on DeepSpeed's ZeRO optimizers share: what a step came to, and saving and loading their state."""

    engine: Any
    config: RunConfig
    mesh: Mesh
    model: Stack
    weights: tuple[ShardedParameter, ...]
    state: State
    scale: LossScale | None

    def result(self, loss: Tensor, scale: float, seconds: Mapping[str, float] = MappingProxyType({})) -> StepResult:
        """The result of the step that DeepSpeed has just done; of its norm and of overflows the host knows."""
        overflow = bool(self.engine.optimizer.overflow)
        result = DeviceResult.of(loss, self.engine.get_global_grad_norm(), overflow, scale, seconds)
        if self.scale:
            self.scale = self.scale.after(overflow, self.config.scaler)
        return result

    def expected_weights(self, given: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The saved weights, by name and shape, that this process must hold."""
        return given

    @cached_property
    def sharing(self) -> Sharing:
        """What this process saves and reads."""
        held = [self.state.run(weight) for weight in self.weights]
        return Sharing.among(held, self.mesh, self.config.checkpoint.file_mb)

    def tensors(self) -> Iterator[Shard]:
        """Weights, and Adam's moments once there are any."""
        yield from self.state.tensors(self.sharing)

    def scalars(self) -> dict[str, Any]:
        """Adam's step count, and the loss scale."""
        return {"optimizer_steps": self.state.steps(), "loss_scale": self.scale and vars(self.scale).copy()}

    @torch.no_grad()
    def load(self, saved: SavedState, scalars: dict[str, Any]) -> None:
        """Load a saved state."""
        given = {name.removeprefix("model."): shape for name, shape in saved.shapes().items() if name[:6] == "model."}
        check_shapes(self.model.placements, self.expected_weights(given))
        self.state.load(self.sharing, saved, scalars["optimizer_steps"])
        if self.scale:
            self.scale = LossScale.of(scalars["loss_scale"], self.config.scaler)
