"""AdamW (Loshchilov and Hutter 2019) with decaying and non-decaying groups, and gradient clipping by a given norm."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpclm.config import OptimConfig
from hpclm.node import apex

log = logging.getLogger(__name__)


def bare(method: Any) -> Any:
    """A PyTorch method without its decorators, if any."""
    return getattr(method, "__wrapped__", method)


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW without the decorators that import torch._dynamo, which takes every process a second."""

    add_param_group = bare(torch.optim.AdamW.add_param_group)
    zero_grad = bare(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(bare(torch.optim.AdamW.step))


def groups(
    decaying: Sequence[nn.Parameter], others: Sequence[nn.Parameter], optim: OptimConfig
) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay; empty groups are left out."""
    found = [dict(params=list(decaying), weight_decay=optim.weight_decay), dict(params=list(others), weight_decay=0.0)]
    return [group for group in found if group["params"]]


def adamw(parameter_groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """The configured optimizer; the learning rate is set before each step.

    Falls back to PyTorch's, with a warning, if NVIDIA apex is requested but not installed.
    """
    settings: dict[str, Any] = dict(lr=optim.lr, betas=optim.betas, eps=optim.eps)
    if optim.name == "apex_adam":
        found = apex.fused_adam(parameter_groups, **settings)
        if found is not None:
            log.info("optimizer: NVIDIA apex's FusedAdam")
            return found
        log.warning(
            "optim.name=apex_adam: NVIDIA apex is not usable here (hpclm doctor says why); using PyTorch's fused AdamW"
        )
    return AdamW(parameter_groups, fused=True, **settings)  # one fused kernel per device, CPU and CUDA


def update(optimizer: torch.optim.Optimizer, lr: float, norm: Tensor, limit: float, scale: float, bad: Tensor) -> None:
    """One update at ``lr``; PyTorch's optimizer does not synchronise with the device.

    ``norm`` is the global norm of the scaled gradients. They are divided by the loss ``scale`` and clipped to ``limit``
    (Pascanu et al. 2013, with Megatron's coefficient; 0: no clipping), inside the fused kernel if possible. If ``bad`` is 1
    the update is skipped, and the step count does not change.
    """
    coefficient = (limit / (norm / scale + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if isinstance(optimizer, torch.optim.AdamW):
        amp: Any = optimizer  # the attributes that torch.amp.GradScaler sets on fused optimizers
        amp.grad_scale, amp.found_inf = scale / coefficient, bad
        optimizer.step()
    elif not bad:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(gradients, coefficient / scale)
        optimizer.step()


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """The step count of the bias correction."""
    for group in optimizer.param_groups:
        if "step" in group:  # apex counts per group
            return int(group["step"])
    return next((int(state["step"].item()) for state in optimizer.state.values() if "step" in state), 0)


def reset_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Drop the optimizer state of ``parameter``, as before the first step."""
    optimizer.state.pop(parameter, None)
    for group in optimizer.param_groups:
        if "step" in group:  # apex counts per group
            group["step"] = 0


def restore(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, moments: Mapping[str, Tensor], steps: int
) -> None:
    """Set the optimizer state of ``parameter`` to ``moments``, after ``steps`` steps."""
    if isinstance(optimizer, torch.optim.AdamW):
        step = torch.tensor(float(steps), device=parameter.device)
        optimizer.state[parameter] = {"step": step, **moments}
        return
    optimizer.state[parameter] = dict(moments)
    for group in optimizer.param_groups:
        group["step"] = steps
