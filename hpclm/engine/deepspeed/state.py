"""fp32 weights and moments inside DeepSpeed's optimizers, as logical tensors: read and written a weight at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from deepspeed import utils
from torch import Tensor

from hpclm.config import RunConfig
from hpclm.engine import SavedState, Shard
from hpclm.engine.base import MOMENTS
from hpclm.engine.deepspeed import library
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.sharing import Sharing
from hpclm.model.stack import Stack, check_shapes
from hpclm.optim.scaler import LossScale
from hpclm.parallel.mesh import Mesh


class State:
    """The state of ``wrapper``, DeepSpeed's ZeRO optimizer, around ``optimizer``, ours, whose parameters are flat partitions."""

    def __init__(self, wrapper: Any, optimizer: torch.optim.Optimizer):
        self.wrapper, self.optimizer = wrapper, optimizer
        self.sharded = library.stage_3(wrapper)
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        self.flat: list[Tensor] = next(getattr(wrapper, name) for name in names if hasattr(wrapper, name))
        self.by_group = type(optimizer).__module__.startswith(
            "apex"
        )  # apex counts steps per group, others per parameter
        self._begin(0)  # DeepSpeed alone would link the moments of its first parameter group only

    def steps(self) -> int:
        """Updates so far."""
        counting = self.optimizer.param_groups if self.by_group else self.optimizer.state.values()
        return max((int(state["step"]) for state in counting if "step" in state), default=0)

    def tensors(self, sharing: Sharing) -> Iterator[Shard]:
        """The shards that this process saves."""
        moments = MOMENTS if self.steps() else ()
        for number, weight in enumerate(sharing.weights):
            yield from sharing.shards(number, f"model.{weight.name}", self._values(weight))
            for moment in moments:
                yield from sharing.shards(number, f"optim.{moment}.{weight.name}", self._values(weight, moment))

    def load(self, sharing: Sharing, saved: SavedState, steps: int) -> None:
        """Load the weights, and the moments if there were ``steps`` updates."""
        if steps or self.steps():
            self._begin(steps)
        for number, weight in enumerate(sharing.weights):
            for moment in (None, *(MOMENTS if steps else ())):
                values = torch.empty(self._size(weight), device=weight.parameter.device)
                name = f"optim.{moment}.{weight.name}" if moment else f"model.{weight.name}"
                sharing.load(number, name, saved, values)
                self._set(weight, values, moment)
        self._publish()

    def sharing(self, weights: Sequence[ShardedParameter], mesh: Mesh, least: float) -> Sharing:
        """What this process saves and reads: the runs of values in its partitions; ``least`` as in Sharing.among."""
        return Sharing.among([self._run(weight, mesh) for weight in weights], mesh, least)

    def _run(self, weight: ShardedParameter, mesh: Mesh) -> ShardedParameter:
        parameter: Any = weight.parameter
        if self.sharded:
            begin, size = mesh.shard.rank * self._size(weight), self._size(weight)  # the last partitions are padded
            return replace(weight, begin=begin, values=min(max(0, parameter.ds_numel - begin), size))
        mapping = parameter._hp_mapping
        address = mapping and mapping.lp_fragment_address
        return replace(weight, begin=address.start if address else 0, values=self._size(weight))

    def _size(self, weight: ShardedParameter) -> int:
        """Values of a weight in this process's partition, with padding."""
        parameter: Any = weight.parameter
        if self.sharded:
            return int(parameter.ds_tensor.ds_numel)
        return parameter._hp_mapping.lp_fragment_address.numel if parameter._hp_mapping else 0

    def _values(self, weight: ShardedParameter, moment: str | None = None) -> Tensor:
        """This process's values of a weight, or of one of its moments."""
        parameter: Any = weight.parameter
        if not self.sharded:
            return parameter._hp_mapping.get_hp_fragment(moment) if parameter._hp_mapping else torch.empty(0)
        values, number = self.wrapper._get_fp32_opt_state_partition(parameter, True, moment)
        return values.clone() if self._on_disk(number) else values  # the next one is swapped in where this one was

    def _begin(self, steps: int) -> None:
        """Set the moments to 0 and the step count to ``steps``."""
        tensor, untouched = isinstance(self.optimizer, torch.optim.AdamW), not steps and not self.steps()
        for number, flat in enumerate(self.flat):
            if self._on_disk(number) and untouched:
                continue  # the first update allocates it there
            with self._present(number):
                counted = {"step": torch.tensor(float(steps), device=flat.device) if tensor else steps}
                moments = {moment: torch.zeros_like(flat) for moment in MOMENTS}
                self.optimizer.state[flat] = moments if self.by_group else {**counted, **moments}
        if self.by_group:
            for group in self.optimizer.param_groups:
                group["step"] = steps
        if not self.sharded:
            self.wrapper._hp_optimizer_states_linked = False
            self.wrapper._lazy_init_hp_params_optimizer_state()

    def _on_disk(self, number: int) -> bool:
        """Whether a flat partition and its moments are offloaded to disk (engine.offload_folder)."""
        return self.sharded and self.wrapper._swappable_optimizer_subgroup(number)

    @contextmanager
    def _present(self, number: int) -> Iterator[None]:
        """Keep a flat partition in memory for the duration of the block."""
        on_disk = self._on_disk(number)
        if on_disk:
            self.wrapper._optimizer_states_and_gradient_swap_in(number)
        yield
        if on_disk:
            self.wrapper._optimizer_states_and_gradient_swap_out(number)

    def _set(self, weight: ShardedParameter, values: Tensor, moment: str | None) -> None:
        """Write this process's values of one tensor."""
        parameter: Any = weight.parameter
        if not self.sharded:
            self._values(weight, moment).copy_(values)
        elif moment is None:
            utils.safe_set_local_fp32_param(parameter, values)
        else:
            utils.safe_set_local_optimizer_state(parameter, values, moment)

    def _publish(self) -> None:
        """Copy the optimizer's fp32 weights into the model."""
        wrapper = self.wrapper
        if not self.sharded:
            wrapper.update_lp_params()
            return
        wrapper._partition_all_parameters()
        for number in range(len(self.flat)):
            with self._present(number):
                wrapper._reassign_or_swap_out_partitioned_parameters(number)
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)


class Wrapped:
    """What the engines on DeepSpeed's ZeRO optimizers share: saving and loading their state."""

    config: RunConfig
    mesh: Mesh
    model: Stack
    weights: tuple[ShardedParameter, ...]
    state: State
    scale: LossScale | None

    def expected_weights(self, given: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The saved weights, by name and shape, that this process must hold."""
        return given

    @cached_property
    def sharing(self) -> Sharing:
        """What this process saves and reads."""
        return self.state.sharing(self.weights, self.mesh, self.config.checkpoint.file_mb)

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
