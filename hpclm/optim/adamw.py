"""AdamW (Loshchilov and Hutter 2019) with the decay policy of the settings, and clipping on the true global norm."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hpclm.config import OptimConfig


def groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups: what decays, and what does not."""
    everything = [p for p in model.parameters() if p.requires_grad]
    decays = [optim.decayed == "all" or p.ndim >= 2 for p in everything]
    return [
        dict(params=[p for p, yes in zip(everything, decays, strict=True) if yes], weight_decay=optim.weight_decay),
        dict(params=[p for p, yes in zip(everything, decays, strict=True) if not yes], weight_decay=0.0),
    ]


def adamw(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """The optimizer over ``model``; the learning rate is set before each step."""
    return torch.optim.AdamW(
        [group for group in groups(model, optim) if group["params"]],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=True,  # one kernel a device, CPU and CUDA
    )


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm over all gradients as one vector, in fp32."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


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
