"""NVIDIA apex, if it is installed: fused norms, rotary positions and Adam for GPUs. The only file that imports it.

PyPI's ``apex`` is an unrelated package, so each part of NVIDIA's is tried.
"""

import importlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple


class Kernels(NamedTuple):
    """apex's fused operations; None if apex was built without."""

    layer_norm: Callable[..., Any] | None
    """(x, weight, bias, shape, eps) -> x normalised over its last dimensions ``shape``."""
    rms_norm: Callable[..., Any] | None
    """(x, weight, shape, eps) -> the same for RMSNorm."""
    rotate: Callable[..., Any] | None
    """(x [T, B, H, D], cos, sin [T, 1, 1, D]) -> x with each pair of features rotated."""

    def names(self) -> list[str]:
        """Names of the available ones, for messages."""
        words = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "rotate": "rotary positions"}
        return [words[name] for name, kernel in self._asdict().items() if kernel]


@cache
def kernels() -> Kernels:
    """The available operations."""
    layer_norm = rms_norm = rotate = None
    try:
        import fused_layer_norm_cuda  # noqa: F401 (otherwise imported at the first call)
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

        layer_norm, rms_norm = fused_layer_norm_affine, fused_rms_norm_affine
    except Exception:  # an unrelated package may fail in any way
        pass
    with suppress(Exception):
        rotate = _rotation(_rotary_extension())
    return Kernels(layer_norm, rms_norm, rotate)


def _rotary_extension() -> Any:
    """The compiled half of apex's rotary positions. Its Python half, apex.transformer, is gone from newer versions."""
    try:
        return importlib.import_module("fused_rotary_positional_embedding")
    except ImportError:
        return importlib.import_module("apex._extensions.fused_rotary_positional_embedding")


def _rotation(extension: Any) -> Callable[..., Any]:
    """(x, cos, sin) -> x rotated, with its gradient, by the extension's two kernels."""
    import torch

    forward, backward = extension.forward_cached, extension.backward_cached

    class Rotation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, cos: Any, sin: Any) -> Any:
            ctx.save_for_backward(cos, sin)
            return forward(x, cos, sin, False)

        @staticmethod
        def backward(ctx: Any, *outer: Any) -> Any:
            return backward(outer[0], *ctx.saved_tensors, False), None, None

    return Rotation.apply


def fused_adam(groups: Iterable[dict[str, Any]], **settings: Any) -> Any | None:
    """apex's FusedAdam with decoupled weight decay; None if it is not available."""
    try:
        from apex.optimizers import FusedAdam

        return FusedAdam(list(groups), adam_w_mode=True, **settings)
    except Exception:
        return None
