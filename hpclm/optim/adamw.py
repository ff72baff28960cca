"""AdamW (Loshchilov and Hutter 2019), clipping by a given norm, and the step count of any optimizer."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hpclm.config import OptimConfig
from hpclm.node import apex
from hpclm.optim.optimizers import OptimizedWeight, rate_and_decay

log = logging.getLogger(__name__)


def bare(method: Any) -> Any:
    """A PyTorch method without its decorators, if any."""
    return getattr(method, "__wrapped__", method)


class Scaled:
    """An optimizer that divides gradients by ``grad_scale``, and changes nothing if ``found_inf`` is 1. Both are single-value tensors on
    the device, as torch.amp.GradScaler sets them on fused optimizers."""

    grad_scale: Tensor
    found_inf: Tensor


@runtime_checkable
class Restorable(Protocol):
    """An optimizer that counts its updates and restores its state itself."""

    def restore(self, parameter: Tensor, tensors: Mapping[str, Tensor] | None, steps: int) -> None:
        """Set the state of ``parameter``; see ``set_state``."""

    def steps_taken(self) -> int:
        """The number of updates."""


class AdamW(Scaled, torch.optim.AdamW):
    """PyTorch's AdamW without the decorators that import torch._dynamo, which takes every process a second."""

    add_param_group = bare(torch.optim.AdamW.add_param_group)
    zero_grad = bare(torch.optim.AdamW.zero_grad)
    pytorch_step = torch.no_grad()(bare(torch.optim.AdamW.step))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update, without a closure."""
        if all(group["fused"] for group in self.param_groups):
            return self.pytorch_step()
        # unfused kernels support neither a scale nor skipping
        scale = vars(self).pop("grad_scale")
        skipped = vars(self).pop("found_inf")
        if skipped:
            return None
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad = parameter.grad / scale
        return self.pytorch_step()


def groups(weights: Sequence[OptimizedWeight], optim: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups of weights with the same weight decay and the same ``factor`` on the learning rate."""
    members: dict[tuple[float, float], list[Any]] = {}
    for weight in weights:
        members.setdefault(rate_and_decay(weight.name, weight.placement, optim), []).append(weight.parameter)
    if not members:  # PyTorch's optimizers need a group, even if a pipeline stage trains no weight
        members[1.0, 0.0] = []
    return [dict(params=params, factor=factor, weight_decay=decay) for (factor, decay), params in members.items()]


def fused_adamw(weights: Sequence[OptimizedWeight], optim: OptimConfig) -> torch.optim.Optimizer:
    """PyTorch's AdamW: one fused kernel per device, CPU and CUDA."""
    return AdamW(groups(weights, optim), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def apex_adam(weights: Sequence[OptimizedWeight], optim: OptimConfig) -> torch.optim.Optimizer:
    """NVIDIA apex's FusedAdam; PyTorch's, with a warning, if apex is not installed."""
    optimizer = apex.fused_adam(groups(weights, optim), lr=optim.lr, betas=optim.betas, eps=optim.eps)
    if optimizer is not None:
        log.info("optimizer: NVIDIA apex's FusedAdam")
        return optimizer
    log.warning("optim.name=apex_adam: NVIDIA apex is not usable here; using PyTorch's fused AdamW")
    return fused_adamw(weights, optim)


def update(optimizer: torch.optim.Optimizer, norm: Tensor, limit: float, scale: float, bad: Tensor) -> None:
    """One update; PyTorch's fused AdamW does not synchronise with the device.

    ``norm`` is the global norm of the scaled gradients. They are divided by the loss ``scale`` and clipped to ``limit`` (Pascanu et al.
    2013, with Megatron's coefficient; 0: no clipping), inside the fused kernel if possible. If ``bad`` is 1, the update is skipped, and
    the step count does not change.
    """
    # on the device: a comparison on the host would wait in every step
    coefficient = torch.ones_like(norm)
    if limit:
        coefficient = (limit / (norm / scale + 1e-6)).clamp(max=1.0)
    if isinstance(optimizer, Scaled):
        optimizer.grad_scale = scale / coefficient
        optimizer.found_inf = bad
        optimizer.step()
    # this waits for the device: unfused optimizers cannot skip on the device
    elif not bad:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradients:  # a pipeline stage may train no weight
            torch._foreach_mul_(gradients, coefficient / scale)
        optimizer.step()


def steps_by_group(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer counts steps for each parameter group, like apex's, or for each parameter, like all others."""
    return type(optimizer).__module__.startswith("apex")


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """The step count of the bias correction."""
    if isinstance(optimizer, Restorable):
        return optimizer.steps_taken()
    counting = optimizer.param_groups if steps_by_group(optimizer) else optimizer.state.values()
    steps = [torch.as_tensor(entry["step"]) for entry in counting if "step" in entry]
    # one wait for each device: Muon counts where its weights are, PyTorch's unfused AdamW in CPU memory
    devices = {count.device for count in steps}
    return max((int(torch.stack([c for c in steps if c.device == device]).max()) for device in devices), default=0)


def set_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, tensors: Mapping[str, Tensor] | None, steps: int
) -> None:
    """Set the state of ``parameter`` after ``steps`` steps to ``tensors``, by name; None: the state before the first step."""
    if isinstance(optimizer, Restorable):
        optimizer.restore(parameter, tensors, steps)
        return
    if steps_by_group(optimizer):
        for group in optimizer.param_groups:
            group["step"] = steps
    if tensors is None:
        optimizer.state.pop(parameter, None)
        return
    optimizer.state[parameter] = dict(tensors)
    if not steps_by_group(optimizer):
        # as PyTorch's fused kernels keep it: fp32, next to the parameter
        counted = torch.tensor(float(steps), device=parameter.device)
        optimizer.state[parameter]["step"] = counted if isinstance(optimizer, Scaled) else steps
