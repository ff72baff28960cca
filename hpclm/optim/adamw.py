"""AdamW (Loshchilov and Hutter 2019) over groups that decay and that do not, and clipping on a norm that is passed in."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpclm import apex
from hpclm.config import OptimConfig

log = logging.getLogger(__name__)


def bare(method: Any) -> Any:
    """A method of PyTorch's without what PyTorch has wrapped around it, if anything."""
    return getattr(method, "__wrapped__", method)


class AdamW(torch.optim.AdamW):
    """PyTorch's; its methods do not load PyTorch's compiler to keep it out of them, which takes each process a second."""

    add_param_group = bare(torch.optim.AdamW.add_param_group)
    zero_grad = bare(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(bare(torch.optim.AdamW.step))


def groups(
    decaying: Sequence[nn.Parameter], others: Sequence[nn.Parameter], optim: OptimConfig
) -> list[dict[str, Any]]:
    """Parameter groups: what decays, and what does not; none without parameters."""
    found = [
        dict(params=list(decaying), weight_decay=optim.weight_decay),
        dict(params=list(others), weight_decay=0.0),
    ]
    return [group for group in found if group["params"]]


def adamw(parameter_groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer that the settings name; the learning rate is set before each step.

    PyTorch's own where NVIDIA apex was asked for and is not here, with a warning.
    """
    settings: dict[str, Any] = dict(lr=optim.lr, betas=optim.betas, eps=optim.eps)
    if optim.name == "apex_adam":
        found = apex.fused_adam(parameter_groups, **settings)
        if found is not None:
            log.info("optimizer: NVIDIA apex's FusedAdam")
            return found
        log.warning(
            "optim.name=apex_adam: NVIDIA apex is not usable here (hpclm doctor says why); PyTorch's fused AdamW"
        )
    return AdamW(parameter_groups, fused=True, **settings)  # one kernel a device, CPU and CUDA


def update(optimizer: torch.optim.Optimizer, lr: float, norm: Tensor, limit: float, scale: float, bad: Tensor) -> None:
    """One step at ``lr``; with PyTorch's optimizer without waiting for the device.

    ``norm`` is the global norm of the gradients times the loss ``scale``. They are divided by the scale and shortened to
    ``limit`` (Pascanu et al. 2013, with Megatron's coefficient; 0 leaves their length alone), inside the fused kernel where
    it can, and nothing happens at all, not even to the step count, where ``bad`` is 1.
    """
    coefficient = (limit / (norm / scale + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if isinstance(optimizer, torch.optim.AdamW):
        amp: Any = optimizer  # the two attributes by which torch.amp.GradScaler speaks to fused optimizers
        amp.grad_scale, amp.found_inf = scale / coefficient, bad
        optimizer.step()
    elif not bad:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(gradients, coefficient / scale)
        optimizer.step()


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """Steps that the bias correction counts."""
    for group in optimizer.param_groups:
        if "step" in group:  # apex counts for a group
            return int(group["step"])
    return next((int(state["step"].item()) for state in optimizer.state.values() if "step" in state), 0)


def forget(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Make the optimizer hold nothing of ``parameter``, as before the first step."""
    optimizer.state.pop(parameter, None)
    for group in optimizer.param_groups:
        if "step" in group:  # apex counts for a group
            group["step"] = 0


def restore(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, moments: Mapping[str, Tensor], steps: int
) -> None:
    """Make the optimizer hold ``moments`` of ``parameter``, as after ``steps`` steps."""
    if isinstance(optimizer, torch.optim.AdamW):
        step = torch.tensor(float(steps), device=parameter.device)
        optimizer.state[parameter] = {"step": step, **moments}
        return
    optimizer.state[parameter] = dict(moments)
    for group in optimizer.param_groups:
        group["step"] = steps
