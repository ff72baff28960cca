"""AdamW (Loshchilov and Hutter 2019) over groups that decay and that do not, and clipping on a norm that is passed in."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpclm.config import OptimConfig


def groups(
    decaying: Sequence[nn.Parameter], others: Sequence[nn.Parameter], optim: OptimConfig
) -> list[dict[str, Any]]:
    """Parameter groups: what decays, and what does not; none without parameters."""
    found = [
        dict(params=list(decaying), weight_decay=optim.weight_decay),
        dict(params=list(others), weight_decay=0.0),
    ]
    return [group for group in found if group["params"]]


def adamw(parameter_groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.AdamW:
    """PyTorch's optimizer; the learning rate is set before each step."""
    return torch.optim.AdamW(
        parameter_groups,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=True,  # one kernel a device, CPU and CUDA
    )


def update(optimizer: torch.optim.AdamW, lr: float, norm: Tensor, limit: float, scale: float, bad: Tensor) -> None:
    """One step at ``lr``, without waiting for the device.

    ``norm`` is the global norm of the gradients times the loss ``scale``. Inside the fused kernel they are divided by the
    scale and shortened to ``limit`` (Pascanu et al. 2013, with Megatron's coefficient; 0 leaves their length alone), and
    nothing happens at all, not even to the step count, where ``bad`` is 1.
    """
    coefficient = (limit / (norm / scale + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    amp: Any = optimizer  # the two attributes by which torch.amp.GradScaler speaks to fused optimizers
    amp.grad_scale, amp.found_inf = scale / coefficient, bad
    optimizer.step()
