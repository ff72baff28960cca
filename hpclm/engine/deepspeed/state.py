"""fp32 weights and moments inside DeepSpeed's optimizers, as logical tensors: read and written a weight at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import utils
from torch import Tensor

from hpclm.config import RunConfig
from hpclm.engine import Saved, Shard
from hpclm.engine.held import Held, read, shards
from hpclm.engine.plain import MOMENTS
from hpclm.model.stack import Stack, check_shapes
from hpclm.optim.scaler import LossScale
from hpclm.parallel.mesh import Mesh


class State:
    """What ``wrapper``, DeepSpeed's optimizer, makes of ``optimizer``, ours, whose parameters are flat parts of many weights."""

    def __init__(self, wrapper: Any, optimizer: torch.optim.Optimizer):
        self.wrapper, self.optimizer = wrapper, optimizer
        self.sharded = hasattr(wrapper, "fp32_partitioned_groups_flat")  # stage 3
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        self.flat: list[Tensor] = next(getattr(wrapper, name) for name in names if hasattr(wrapper, name))
        self.by_group = type(optimizer).__module__.startswith("apex")  # it counts steps there, others with the moments
        self._begin(0)  # DeepSpeed would connect the moments of its first parameter group only

    def steps(self) -> int:
        """Updates so far."""
        counting = self.optimizer.param_groups if self.by_group else self.optimizer.state.values()
        return max((int(held["step"]) for held in counting if "step" in held), default=0)

    def tensors(self, all_held: Sequence[Held], mesh: Mesh) -> Iterator[Shard]:
        """What this process saves; the replicas come together for each tensor."""
        moments = MOMENTS if self.steps() else ()
        for number, held in enumerate(all_held):
            parameter = held.parameter
            yield from kept(held, f"model.{held.name}", utils.safe_get_full_fp32_param(parameter), mesh, number)
            for moment in moments:
                whole = utils.safe_get_full_optimizer_state(parameter, moment)
                yield from kept(held, f"optim.{moment}.{held.name}", whole, mesh, number)

    def load(self, all_held: Sequence[Held], saved: Saved, steps: int, mesh: Mesh) -> None:
        """Take over weights, and moments if there were ``steps`` updates."""
        if steps or self.steps():
            self._begin(steps)
        for held in all_held:
            self._set(held, read(held, f"model.{held.name}", saved, mesh.tp), None, mesh)
            for moment in MOMENTS if steps else ():
                self._set(held, read(held, f"optim.{moment}.{held.name}", saved, mesh.tp), moment, mesh)
        self._publish()

    def _begin(self, steps: int) -> None:
        """Moments of 0, after ``steps`` updates."""
        tensor, untouched = isinstance(self.optimizer, torch.optim.AdamW), not steps and not self.steps()
        for number, flat in enumerate(self.flat):
            if self._on_disk(number) and untouched:
                continue  # the first update makes room there
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
        """Whether a flat part and its moments lie on a disk (engine.offload_folder)."""
        return self.sharded and self.wrapper._swappable_optimizer_subgroup(number)

    @contextmanager
    def _present(self, number: int) -> Iterator[None]:
        """While the block runs, a flat part is in memory."""
        on_disk = self._on_disk(number)
        if on_disk:
            self.wrapper._optimizer_states_and_gradient_swap_in(number)
        yield
        if on_disk:
            self.wrapper._optimizer_states_and_gradient_swap_out(number)

    def _set(self, held: Held, value: Tensor, moment: str | None, mesh: Mesh) -> None:
        """Write this process's part of one tensor."""
        parameter: Any = held.parameter
        if self.sharded:
            size = parameter.ds_tensor.ds_numel
            flat = value.new_zeros(size * mesh.dp.size)
            flat[: value.numel()] = value.flatten()
            value = flat[size * mesh.dp.rank :][:size]
            if moment is None:
                utils.safe_set_local_fp32_param(parameter, value)
            else:
                utils.safe_set_local_optimizer_state(parameter, value, moment)
        elif moment is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, moment)

    def _publish(self) -> None:
        """Give the model the weights that the optimizer holds."""
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
    """What engines around one of DeepSpeed's optimizers have in common: their state on its way into a checkpoint and back."""

    config: RunConfig
    mesh: Mesh
    model: Stack
    held: tuple[Held, ...]
    state: State
    scale: LossScale | None

    def answers_for(self, given: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Of the saved weights, by name and shape, those that this process must know."""
        return given

    @torch.no_grad()
    def tensors(self) -> Iterator[Shard]:
        """Weights, and Adam's moments once there are any."""
        yield from self.state.tensors(self.held, self.mesh)

    def scalars(self) -> dict[str, Any]:
        """Adam's step count, and the loss scale."""
        return {"optimizer_steps": self.state.steps(), "loss_scale": self.scale and vars(self.scale).copy()}

    @torch.no_grad()
    def load(self, saved: Saved, scalars: dict[str, Any]) -> None:
        """Take over a saved state."""
        given = {name.removeprefix("model."): shape for name, shape in saved.shapes().items() if name[:6] == "model."}
        check_shapes(self.model.forms, self.answers_for(given))
        self.state.load(self.held, saved, scalars["optimizer_steps"], self.mesh)
        if self.scale:
            self.scale = LossScale.of(scalars["loss_scale"], self.config.scaler)


def kept(held: Held, name: str, whole: Tensor, mesh: Mesh, owner: int) -> Iterator[Shard]:
    """What this process saves of ``whole``, off the device: many such tensors would not fit there beside the model."""
    for shard in shards(held, name, whole, mesh, owner):
        yield Shard(shard.name, shard.tensor.cpu(), shard.shape, shard.start)
