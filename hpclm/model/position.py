"""Where a token stands: sinusoidal tables, rotary embeddings, ALiBi, and documents inside a sample.

T tokens in a sequence, B sequences, H heads of this process, D width of one head.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.parallel.mesh import ALONE, Axis

FAIRSEQ_FIRST = 2  # fairseq counts positions from padding_idx + 1 = 2


class Layout(NamedTuple):
    """What attention and position embeddings must know of a micro-batch; made once, read by every layer."""

    positions: Tensor | None  # [B, T], only where they restart; None: 0 .. T-1
    mask: Tensor | None  # [B or 1, 1 or H, T, T]: True may be seen, or added to the scores; None: causal
    cos: Tensor | None  # [T, B or 1, 1, D], for rotary positions
    sin: Tensor | None
    seed: int | None = None  # what dropout in this micro-batch follows from; None: nothing random happens


class Kind(NamedTuple):
    """What the activations of a micro-batch are."""

    length: int
    """Tokens in a sequence."""
    dtype: torch.dtype
    device: torch.device


def layout(
    config: ModelConfig,
    kind: Kind,
    tp: Axis,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    seed: int | None = None,
) -> Layout:
    """The layout of a micro-batch.

    ``positions`` [B, T] restart inside a sample, or None. ``documents`` [B, T] number the document of every token when
    attention must stay inside it, or None.
    """
    length, dtype, device = kind
    mask = (
        None
        if documents is None
        else causal(length, device) & (documents[:, None, :, None] == documents[:, None, None, :])
    )
    if config.positions == "alibi":
        bias = alibi(config.heads, length, device, tp)
        seen = causal(length, device) if mask is None else mask
        mask = bias.masked_fill(~seen, -torch.inf).to(dtype)
    cos = sin = None
    if config.positions == "rope":
        where = torch.arange(length, device=device)[:, None] if positions is None else positions.t()
        cos, sin = (x.to(dtype) for x in rotary(where, config.head_width, config.rope_base))
    return Layout(positions, mask, cos, sin, seed)


def causal(length: int, device: torch.device) -> Tensor:
    """[1, 1, T, T]: True where the row's token may see the column's."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def alibi(heads: int, length: int, device: torch.device, tp: Axis = ALONE) -> Tensor:
    """[1, H, T, T] distances times a slope for each of this process's share of ``heads`` (Press et al. 2022)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]  # the paper's filling for other counts
    share = heads // tp.size
    slopes = slopes[tp.rank * share : (tp.rank + 1) * share]
    where = torch.arange(length, device=device)
    distance = where[None, :] - where[:, None]
    return torch.tensor(slopes, device=device)[None, :, None, None] * distance


def rotary(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """[T, B] positions -> cosines and sines [T, B, 1, D] (Su et al. 2021, the half-rotation of Llama)."""
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    angles = positions[..., None, None].float() * (1.0 / base**steps)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features of x [T, B, H, D] by its position's angle."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def sinusoids(length: int, width: int) -> Tensor:
    """[length, width] fixed positions (Vaswani et al. 2017) as fairseq arranges them: sines, then cosines, from position 2.

    Computed also where a model is built as shapes only.
    """
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device="cpu")
    rates = torch.exp(steps * -(math.log(10000) / max(1, half - 1)))
    where = torch.arange(FAIRSEQ_FIRST, FAIRSEQ_FIRST + length, dtype=torch.float32, device="cpu")
    angles = where[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)
