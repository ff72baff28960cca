"""NVIDIA apex where it is installed: fused norms, rotary positions and Adam, for GPUs.

The only file that imports it. PyPI's ``apex`` is an unrelated package, so what counts is that NVIDIA's parts can be imported.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple


class Kernels(NamedTuple):
    """apex's fused operations; a None is one that this apex was built without."""

    layer_norm: Callable[..., Any] | None
    """(x, weight, bias, shape, eps) -> x normalised over its last dimensions ``shape``."""
    rms_norm: Callable[..., Any] | None
    """(x, weight, shape, eps) -> the same without a mean and a bias."""
    rotate: Callable[..., Any] | None
    """(x [T, B, H, D], cos, sin [T, 1, 1, D]) -> x with each pair of features turned."""

    def names(self) -> list[str]:
        """Those that there are, in words."""
        words = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "rotate": "rotary positions"}
        return [words[name] for name, kernel in self._asdict().items() if kernel]


@cache
def kernels() -> Kernels:
    """What can be used here."""
    layer_norm = rms_norm = rotate = None
    try:
        import fused_layer_norm_cuda  # noqa: F401 (the compiled half, which the rest would import too late)
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

        layer_norm, rms_norm = fused_layer_norm_affine, fused_rms_norm_affine
    except Exception:  # an unrelated package may fail in any way
        pass
    try:
        import fused_rotary_positional_embedding  # noqa: F401
        from apex.transformer.functional.fused_rope import fused_apply_rotary_pos_emb_cached

        rotate = fused_apply_rotary_pos_emb_cached
    except Exception:
        pass
    return Kernels(layer_norm, rms_norm, rotate)


def fused_adam(groups: Iterable[dict[str, Any]], **settings: Any) -> Any | None:
    """apex's FusedAdam with decoupled weight decay; None where it cannot be used."""
    try:
        from apex.optimizers import FusedAdam

        return FusedAdam(list(groups), adam_w_mode=True, **settings)
    except Exception:
        return None
