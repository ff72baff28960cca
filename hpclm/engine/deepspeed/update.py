"""The end of a step with DeepSpeed's ZeRO optimizers: the norm of the gradients, clipping, and skipping what is not finite.

DeepSpeed decides on the host whether to skip and how to clip, and waits for the device each time. With PyTorch's fused AdamW
these decisions stay on the device: DeepSpeed's step always runs, and the kernel changes nothing if the norm is not finite.
"""

from typing import Any, Protocol

import torch
from deepspeed.runtime.utils import combine_grad_norm_groups, is_model_parallel_parameter
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from hpclm.engine.deepspeed import library
from hpclm.parallel.collectives import all_reduce
from hpclm.parallel.mesh import Mesh


class Update(Protocol):
    """What the last step came to."""

    def norm(self) -> Tensor | float:
        """Global norm of the gradients before clipping, without the loss scale; inf if the step was skipped."""
        ...

    def skipped(self) -> Tensor | bool:
        """Whether the weights did not change; a tensor: 1 if so."""
        ...


def of(engine: Any, optimizer: torch.optim.Optimizer, mesh: Mesh) -> Update:
    """The update of DeepSpeed's ``engine``, whose ZeRO optimizer is around ``optimizer``; without waits if possible."""
    zero = isinstance(engine.optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3))
    if zero and isinstance(optimizer, torch.optim.AdamW) and not library.offloads(engine.optimizer):
        return DeviceUpdate(engine.optimizer, optimizer, mesh)
    return HostUpdate(engine)


class HostUpdate:
    """DeepSpeed's way: of offloaded state, of optimizers that cannot skip an update on the device, and of its BF16_Optimizer,
    which adds gradients up in fp32 at stage 1."""

    def __init__(self, engine: Any):
        self.engine = engine

    def norm(self) -> Tensor | float:
        """As DeepSpeed has it."""
        return self.engine.get_global_grad_norm()

    def skipped(self) -> bool:
        """Whether DeepSpeed found an overflow."""
        return bool(self.engine.optimizer.overflow)


class DeviceUpdate:
    """Replaces the methods of DeepSpeed's optimizer that wait. The arithmetic is DeepSpeed's, to the last bit."""

    def __init__(self, wrapper: Any, optimizer: torch.optim.AdamW, mesh: Mesh):
        self.wrapper, self.mesh = wrapper, mesh
        self.optimizer: Any = optimizer
        self.sharded = library.stage_3(wrapper)
        self.scaled_norm: Tensor
        """Norm of the gradients, which have the loss scale; inf if it is not finite."""
        wrapper.check_overflow = lambda **_: None  # gradients that are not finite have no finite norm
        wrapper.unscale_and_clip_grads = self._unscale_and_clip
        # DeepSpeed looks at what these return: a number that is on the host, and finite
        wrapper.scaled_global_norm = self._measured
        wrapper._get_norm_groups = lambda: [self._measured()]

    def norm(self) -> Tensor:
        """A scalar on the device."""
        return self.scaled_norm / self.wrapper.loss_scale

    def skipped(self) -> Tensor:
        """A scalar on the device."""
        return self.optimizer.found_inf

    def _measured(self) -> float:
        """Measure the norm on the device; fused AdamW skips the update if it is not finite, as torch.amp.GradScaler has it do."""
        held = self.wrapper.fp16_groups if self.sharded else self.wrapper.params_in_partition
        gradients = self.wrapper.averaged_gradients
        self.scaled_norm = combine_grad_norm_groups([self._norm(gradients[i], held[i]) for i in range(len(held))])
        self.optimizer.found_inf = (~torch.isfinite(self.scaled_norm)).float()
        return 0.0

    def _norm(self, gradients: list[Tensor], weights: list[Any]) -> Tensor:
        """Global norm of one group's gradients, summed in fp64."""
        found = [
            torch.linalg.vector_norm(gradient.double())
            for gradient, weight in zip(filter(holds_gradients, gradients), weights, strict=True)
            if not getattr(weight, "ds_pipe_replicated", False)
            and (is_model_parallel_parameter(weight) or self.mesh.tp.first)
        ]
        if not found:
            found.append(torch.zeros((), dtype=torch.float64, device=self.wrapper.device))
        total = torch.stack(found).square().sum()
        if not self.sharded:
            total = total.float()
        return all_reduce(all_reduce(total, self.mesh.dp), self.mesh.model).sqrt()

    def _unscale_and_clip(self, given: Any, _: float) -> None:
        """Divide gradients by the loss scale and clip them. ``given``: stage 3's group number, or a list of gradients."""
        wrapper = self.wrapper
        scale: Tensor | float = wrapper.loss_scale
        if wrapper.clip_grad > 0:
            excess = (self.scaled_norm / wrapper.loss_scale + 1e-6) / wrapper.clip_grad
            scale = excess.clamp(min=1.0) * wrapper.loss_scale
        elif scale == 1:
            return
        for gradient in [wrapper.fp32_partitioned_groups_flat[given].grad] if self.sharded else given:
            gradient.mul_(1.0 / scale)


def holds_gradients(buffer: Any) -> bool:
    """Whether it is not just padding at the end of a partition."""
    return not getattr(buffer, "_zero_padding", False)
