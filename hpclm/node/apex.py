"""NVIDIA apex, if it is installed: fused norms and Adam for GPUs. No other file imports it.

PyPI's ``apex`` is an unrelated package, which may fail in any way, so each part of NVIDIA's apex is tried.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@cache
def norms() -> dict[str, Callable[..., Any]]:
    """The fused norms, by PyTorch's names; empty without apex.

    layer_norm(x, weight, bias, shape, eps) and rms_norm(x, weight, shape, eps) normalise x over its last dimensions, of the shape given.
    """
    try:
        import fused_layer_norm_cuda  # noqa: F401 (otherwise imported at the first call)
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
    except Exception:
        return {}
    return {"layer_norm": fused_layer_norm_affine, "rms_norm": fused_rms_norm_affine}


def has_adam(device: "torch.device") -> bool:
    """Whether apex's FusedAdam can be used on ``device``."""
    import torch

    return fused_adam([{"params": [torch.nn.Parameter(torch.zeros(1, device=device))]}], lr=0.0) is not None


def fused_adam(groups: Iterable[dict[str, Any]], **settings: Any) -> Any | None:
    """apex's FusedAdam with decoupled weight decay; None if it is not available."""
    try:
        from apex.optimizers import FusedAdam

        return FusedAdam(list(groups), adam_w_mode=True, **settings)
    except Exception:
        return None
