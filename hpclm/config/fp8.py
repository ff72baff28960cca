"""The matrices that engine.fp8 multiplies in FP8."""

from typing import Any

MULTIPLE = 16
"""PyTorch's scaled_mm requires that both sides of a matrix are multiples of this."""


def blocks(model: Any) -> range:
    """The indices of the blocks with linear layers in FP8: all but the first and the last."""
    return range(1, model.layers - 1)
