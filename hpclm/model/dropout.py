"""Dropout that is the same in every layout: seeded by the place where it happens, never by earlier events.

On CPUs, random numbers come from PyTorch's generator, which is seeded before each layer. Compiled blocks on GPUs compute them instead
from a key and the index of each value, with Philox (Salmon et al. 2011): nothing is seeded between the kernels of a step, and masks are
the same in every layout, tensor parallelism included.

t tokens of each sequence on this process, B sequences, C hidden size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.config.model import BLOCKS
from hpclm.model.compiled import StackCompilation
from hpclm.model.context import LayerContext
from hpclm.parallel.mesh import Axis
from hpclm.parallel.sequence import SequencePart

MASK = (1 << 64) - 1  # 64-bit arithmetic
WORD = (1 << 32) - 1
# Philox 2x32-10
MULTIPLIER = 0xD256D193
WEYL = 0x9E3779B9
ROUNDS = 10
DROPOUT_SITES = 2
"""Number of places in a layer that apply dropout."""


class LayerSeeds:
    """Seeds each layer's random numbers in a micro-batch: by keys on the device (counter-based), or in PyTorch's generators."""

    by_counter: bool | None = None
    """Whether dropout outside attention is counter-based; None: in compiled blocks of hpclm, on GPUs."""

    def __init__(self, config: ModelConfig, layers: int, tp: Axis, cp: Axis, compilation: StackCompilation):
        """``layers``: number of layers of the whole model."""
        self.config = config
        self.layers = layers
        self.compilation = compilation
        self.rank = tp.rank + tp.size * cp.rank
        """Rank among the processes that divide a sequence; they draw different numbers in attention and in users' blocks."""

    def counts(self, device: torch.device) -> bool:
        """Whether dropout outside attention is counter-based."""
        if self.by_counter is not None:
            return self.by_counter
        return self.compilation.layers and device.type == "cuda" and self.config.block in BLOCKS

    def keys(self, seed: int | None, device: torch.device) -> list[Tensor] | None:
        """The keys of each layer for a micro-batch of training with ``seed``, if dropout is counter-based."""
        if seed is None or not self.config.dropout or not self.counts(device):
            return None
        sites = range(DROPOUT_SITES)
        return list(
            keys_to_device([[mix_seed(seed, n, s) for s in sites] for n in range(self.layers)], device).unbind()
        )

    def of_layer(self, given: LayerContext, number: int, keys: list[Tensor] | None) -> LayerContext:
        """``given`` for layer ``number`` in training; seeds the layer's random numbers."""
        if given.seed is not None and (keys is None or self.config.attention.dropout):
            seed_generators(mix_seed(given.seed, number, self.rank), keys)
        return given if keys is None else given._replace(seed=None, keys=keys[number])


def seed_generators(seed: int, keys: list[Tensor] | None) -> None:
    """Seed PyTorch's generators; with ``keys`` only the GPU's, which the attention kernels use."""
    if keys is None or not keys[0].is_cuda:
        torch.manual_seed(seed)
    else:
        torch.cuda.default_generators[keys[0].get_device()].manual_seed(seed)


def mix_seed(*parts: int) -> int:
    """A 63-bit seed derived from ``parts`` and their order (finaliser of SplitMix64, Steele et al. 2014).

    Seeds depend on the place where dropout happens, never on earlier events. So dropout is the same in every layout of layers and
    micro-batches, and when a layer is recomputed; only tensor-parallel ranks differ.
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & MASK)) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state >> 1


def dropout(
    x: Tensor,
    probability: float,
    keys: Tensor | None = None,
    site: int = 0,
    rank: int = 0,
    part: SequencePart | None = None,
) -> Tensor:
    """Dropout of [t, B, C]; free when it is off.

    ``keys`` [DROPOUT_SITES] of this layer, or None: PyTorch's generator. ``rank``: index of the slice ``x`` in the sequence, or in this
    process's ``part`` of it.
    """
    if not probability:
        return x
    if keys is None:
        return F.dropout(x, probability)
    # the index in the whole activation, not in this slice, so the mask equals that of a single process
    index = torch.arange(x.numel(), device=x.device).view(x.shape) + rank * x.numel()
    if part is not None:
        rows = part.places[rank * len(x) : (rank + 1) * len(x), None, None]
        index = rows * x[0].numel() + torch.arange(x[0].numel(), device=x.device).view(x[0].shape)
    drawn, _ = philox(index & WORD, (keys[site] >> 32) & WORD ^ (index >> 32), keys[site] & WORD)
    # compared as integers, so that every device keeps the same values
    keep = drawn >= int(probability * (1 << 32))
    return torch.where(keep, x * (1 / (1 - probability)), 0.0)


def philox(low: Tensor, high: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Two random words for each counter (``low``, ``high``) and ``key``; all are int64 tensors of 32-bit words."""
    for _ in range(ROUNDS):
        product = low * MULTIPLIER  # wraps around, and keeps all 64 bits
        low = (product >> 32) & WORD ^ key ^ high
        high = product & WORD
        key = (key + WEYL) & WORD
    return low, high


def keys_to_device(keys: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[layers, DROPOUT_SITES] keys on ``device``; the host does not wait for the copy."""
    host = torch.tensor(keys, dtype=torch.int64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
