"""Dropout, and where its random numbers come from.

On CPUs they come from PyTorch's generator, which is seeded before each layer. Compiled blocks on GPUs compute them instead from
a key and the index of each value, with Philox (Salmon et al. 2011): nothing is seeded between the kernels of a step, and the
masks are the same in every layout, with tensor parallelism too.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

WORD = (1 << 32) - 1
MULTIPLIER, WEYL, ROUNDS = 0xD256D193, 0x9E3779B9, 10  # of Philox 2x32-10
SITES = 2
"""Places in a layer that drop values."""


def dropout(
    x: Tensor, probability: float, training: bool, keys: Tensor | None = None, site: int = 0, rank: int = 0
) -> Tensor:
    """Dropout of [t, B, C]; free when it is off.

    ``keys`` [SITES] of this layer, or None: PyTorch's generator. ``rank``: which slice of the sequence ``x`` is.
    """
    if not (training and probability):
        return x
    if keys is None:
        return F.dropout(x, probability)
    index = torch.arange(x.numel(), device=x.device).view(x.shape) + rank * x.numel()
    drawn, _ = philox(index & WORD, (keys[site] >> 32) & WORD ^ (index >> 32), keys[site] & WORD)
    keep = drawn >= int(probability * (1 << 32))
    return torch.where(keep, x * (1 / (1 - probability)), 0.0)


def philox(low: Tensor, high: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Two random words for each counter (``low``, ``high``) and ``key``; all are int64 tensors of 32-bit words."""
    for _ in range(ROUNDS):
        product = low * MULTIPLIER  # wraps around, and keeps all 64 bits
        low, high = (product >> 32) & WORD ^ key ^ high, product & WORD
        key = (key + WEYL) & WORD
    return low, high


def to_device(keys: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[layers, SITES] keys on ``device``; the host does not wait for the copy."""
    found = torch.tensor(keys, dtype=torch.int64)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found
