"""Which products engine.fp8 computes in FP8."""

from typing import Any

MULTIPLE = 16
"""Sides of matrices in FP8 are multiples of this: PyTorch's scaled_mm requires it."""


def blocks(model: Any) -> range:
    """The numbers of the blocks with linear layers in FP8: all but the first and the last."""
    return range(1, model.layers - 1)
