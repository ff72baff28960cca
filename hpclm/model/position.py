"""Position embeddings (sinusoidal, rotary, ALiBi) and attention masks.

T tokens in a sequence, B sequences, H heads of this process, D size of one head.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hpclm.config import ModelConfig
from hpclm.model.compiled import failures
from hpclm.parallel.mesh import SINGLE, Axis

FAIRSEQ_FIRST = 2  # fairseq counts positions from padding_idx + 1 = 2


class Cache(Protocol):
    """Keys and values of earlier tokens (``model/cache.py``)."""

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[T, B, H or G, D] queries, keys and values of the new tokens of ``layer`` -> [T, B, H x D]."""
        ...


class AttentionMetadata(NamedTuple):
    """Positions and masks of a micro-batch; made once, read by every layer."""

    positions: Tensor | None  # [B, T] if they restart inside a sample; None: 0 .. T-1
    mask: Tensor | None  # [B or 1, 1 or H, T, T]: True where attention is allowed, or added to the scores; None: causal
    cos: Tensor | None  # [T, B or 1, 1, D], for rotary positions
    sin: Tensor | None
    seed: int | None = None  # seeds dropout in this micro-batch; None: no dropout
    flex: "Flex | None" = None  # for FlexAttention, in place of a mask
    keys: Tensor | None = (
        None  # [DROPOUT_SITES] int64, of the layer that runs, for dropout by counters; None: PyTorch's generator
    )
    cache: Cache | None = None  # keys and values of earlier tokens, when text is generated


class Flex(NamedTuple):
    """What FlexAttention needs to know of a micro-batch; it makes no [T, T] tensor."""

    blocks: Any
    """BlockMask: which blocks of 128 x 128 scores have any that count, and which scores in them do."""
    slopes: Tensor | None
    """[H] ALiBi slopes of this process's heads."""


class PositionKind(NamedTuple):
    """How a model learns where a token is."""

    learned: bool = False
    """A table of weights is added to the embeddings."""
    table: Callable[[int, int], Tensor] | None = None
    """(context, hidden) -> what is added to the embeddings."""
    rotary: Callable[[Tensor, ModelConfig], tuple[Tensor, Tensor]] | None = None
    """(positions [T, B], config) -> cosines and sines [T, B, 1, D] that rotate queries and keys."""
    slopes: Callable[..., Tensor] | None = None
    """(heads, device, tp) -> [H], the slopes by which scores fall with distance."""


class ActivationSpec(NamedTuple):
    """Length, type and device of the activations of a micro-batch."""

    length: int
    """Tokens in a sequence."""
    dtype: torch.dtype
    device: torch.device


def attention_metadata(
    config: ModelConfig,
    kind: ActivationSpec,
    tp: Axis,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    seed: int | None = None,
    slopes: Tensor | None = None,
    flex: "Flex | None" = None,
) -> AttentionMetadata:
    """The layout of a micro-batch. ``slopes``: of ALiBi, if they exist already. ``flex``: in place of a mask.

    ``positions`` [B, T] restart inside a sample, or None. ``documents`` [B, T] holds the document index of every
    token if attention must not cross documents, or None.
    """
    length, dtype, device = kind
    mask = None if flex else dense_mask(config, kind, tp, documents, slopes)
    cos = sin = None
    if rotary := POSITIONS[config.positions].rotary:
        places = torch.arange(length, device=device)[:, None] if positions is None else positions.t()
        cos, sin = (x.to(dtype) for x in rotary(places, config))
    return AttentionMetadata(positions, mask, cos, sin, seed, flex)


def dense_mask(
    config: ModelConfig, kind: ActivationSpec, tp: Axis, documents: Tensor | None, slopes: Tensor | None
) -> Tensor | None:
    """As AttentionMetadata.mask."""
    length, dtype, device = kind
    mask = None
    if documents is not None:
        mask = causal(length, device) & (documents[:, None, :, None] == documents[:, None, None, :])
    if POSITIONS[config.positions].slopes:
        bias = alibi(config.heads, length, device, tp, slopes)
        mask = bias.masked_fill(~(causal(length, device) if mask is None else mask), -torch.inf).to(dtype)
    return mask


def block_mask(kind: ActivationSpec, documents: Tensor | None) -> Any:
    """FlexAttention's mask: causal, and inside ``documents`` [B, T] if there are any."""
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert documents is not None
        return (q >= k) & (documents[b, q] == documents[b, k])

    length, cuda = kind.length, kind.device.type == "cuda"
    inputs: tuple[Any, ...] = (causal, None) if documents is None else (inside, len(documents))
    create: Any = create_block_mask
    make = partial(create, *inputs, None, length, length, device=kind.device)
    if not cuda:
        return make()
    try:
        return make(_compile=True)
    except failures():  # then blocks cannot be compiled either, and the next micro-batch has a dense mask
        return make()


def causal(length: int, device: torch.device) -> Tensor:
    """[1, 1, T, T]: True where the row's token may attend to the column's."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def alibi_slopes(heads: int, device: torch.device, tp: Axis = SINGLE) -> Tensor:
    """[H] ALiBi slopes of this process's heads out of ``heads`` (Press et al. 2022)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]  # the paper's rule for other counts
    local = heads // tp.size
    return torch.tensor(slopes[tp.rank * local : (tp.rank + 1) * local], device=device)


def alibi(heads: int, length: int, device: torch.device, tp: Axis = SINGLE, slopes: Tensor | None = None) -> Tensor:
    """[1, H, T, T] ALiBi biases, distance times slope, for this process's heads out of ``heads``."""
    slopes = alibi_slopes(heads, device, tp) if slopes is None else slopes
    places = torch.arange(length, device=device)
    distance = places[None, :] - places[:, None]
    return slopes[None, :, None, None] * distance


def rotary(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """[T, B] positions -> cosines and sines [T, B, 1, D] (Su et al. 2021, the half-rotation of Llama)."""
    width = config.head_width
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    angles = positions[..., None, None].float() * (1.0 / config.rope_base**steps)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to x [T, B, H, D]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def sinusoids(length: int, width: int) -> Tensor:
    """[length, width] fixed positions (Vaswani et al. 2017) as fairseq arranges them: sines, then cosines, from position 2.

    Computed on the CPU even if the model is built on the meta device.
    """
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device="cpu")
    rates = torch.exp(steps * -(math.log(10000) / max(1, half - 1)))
    places = torch.arange(FAIRSEQ_FIRST, FAIRSEQ_FIRST + length, dtype=torch.float32, device="cpu")
    angles = places[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


POSITIONS = {
    "learned": PositionKind(learned=True),
    "sinusoidal": PositionKind(table=sinusoids),
    "rope": PositionKind(rotary=rotary),
    "alibi": PositionKind(slopes=alibi_slopes),
    "none": PositionKind(),
}
