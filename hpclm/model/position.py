"""Position embeddings (sinusoidal, rotary, ALiBi) and attention masks.

T tokens in a sequence, B sequences, H heads of this process, D size of one head.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hpclm.config import ModelConfig
from hpclm.model.compiled import failures
from hpclm.model.rope import frequencies
from hpclm.parallel.mesh import SINGLE, Axis
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.parallel.sequence import SequencePart

FAIRSEQ_FIRST = 2  # fairseq counts positions from padding_idx + 1 = 2


class Cache(Protocol):
    """Keys and values of earlier tokens (``model/cache.py``)."""

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Any) -> Tensor:
        """[T, B, H or G, D] queries, keys and values of the new tokens of ``layer`` -> [T, B, H x D]."""
        ...


class AttentionMetadata(NamedTuple):
    """Positions and masks of a micro-batch; made once for each kind of layer."""

    positions: (
        Tensor | None
    )  # [B or 1, t] if they restart inside a sample, or this process holds a part; None: 0 .. T-1
    mask: Tensor | None  # [B or 1, 1 or H, T, T]: True where attention is allowed, or added to the scores; None: causal
    cos: Tensor | None  # [T, B or 1, 1, rotated features], for rotary positions
    sin: Tensor | None
    seed: int | None = None  # seeds dropout in this micro-batch; None: no dropout
    flex: "Flex | None" = None  # for FlexAttention, in place of a mask
    keys: Tensor | None = (
        None  # [DROPOUT_SITES] int64, of the layer that runs, for dropout by counters; None: PyTorch's generator
    )
    cache: Cache | None = None  # keys and values of earlier tokens, when text is generated
    window: int | None = None  # a token attends to this many, itself included; without a mask, as the next three
    documents: Tensor | None = None  # [B, T] the document of each token, which attention does not cross
    starts: tuple[int, ...] | None = (
        None  # of each block of rows, the first column of its documents, where that is known
    )
    slopes: Tensor | None = None  # [H] of ALiBi
    part: SequencePart | None = None  # of each sequence, that this process holds; None: all
    weights: Tensor | None = None  # [t, B] fp32, of this process's tokens in the loss; None: there is no loss
    reports: dict[str, Tensor] | None = None  # what the layer reports (``model/reports.py``)


class Flex(NamedTuple):
    """What FlexAttention needs to know of a micro-batch; it makes no [T, T] tensor."""

    blocks: Any
    """BlockMask: which blocks of 128 x 128 scores have any that count, and which scores in them do."""
    slopes: Tensor | None
    """[H] ALiBi slopes of this process's heads."""
    rows: Tensor | None = None
    """As SequencePart.places."""
    run: Callable[..., Tensor] | None = None
    """flex_attention (hpclm.model.scores), compiled on its own; None: it is compiled with its block."""


Rates = tuple[Tensor, float]
"""[rotated features / 2] radians per position, and the factor of their cosines and sines."""


class PositionKind(NamedTuple):
    """How a model learns where a token is."""

    learned: bool = False
    """A table of weights is added to the embeddings."""
    table: Callable[[int, int], Tensor] | None = None
    """(context, hidden) -> what is added to the embeddings."""
    rotary: bool = False
    """Queries and keys are rotated."""
    slopes: Callable[..., Tensor] | None = None
    """(heads, device, tp) -> [H], the slopes by which scores fall with distance."""


class ActivationSpec(NamedTuple):
    """Length, type and device of the activations of a micro-batch."""

    length: int
    """Tokens in a sequence."""
    dtype: torch.dtype
    device: torch.device


class Prepared(NamedTuple):
    """What is there already when the layout of a micro-batch is made."""

    slopes: Tensor | None = None
    """Of ALiBi."""
    flex: "Flex | None" = None
    """In place of a mask."""
    starts: tuple[int, ...] | None = None
    """As of AttentionMetadata, and ``part``."""
    part: SequencePart | None = None
    rates: Rates | None = None
    """rotary_rates()."""


def attention_metadata(
    config: ModelConfig,
    kind: ActivationSpec,
    tp: Axis,
    batch: MicroBatch,
    layer: str = "full",
    prepared: Prepared = Prepared(),  # noqa: B008 - it is a tuple
) -> AttentionMetadata:
    """The layout of a micro-batch, for layers of kind ``layer``."""
    positions, documents, (slopes, flex, starts, part, rates) = batch.positions, batch.documents, prepared
    length, dtype, device = kind
    window, cos, sin = seen(config, layer, length), None, None
    if part is not None and positions is None:
        positions = part.places[None]
    if rotates(config, layer):
        places = torch.arange(length, device=device)[:, None] if positions is None else positions.t()
        cos, sin = (x.to(dtype) for x in rotary(places, config, layer, length, rates))
    made = AttentionMetadata(positions, None, cos, sin, batch.seed, flex, part=part)
    biased = POSITIONS[config.positions].slopes is not None
    if flex:
        return made._replace(window=window, documents=documents)
    if config.attention_dropout or (biased and (documents, window, part) == (None, None, None)):
        return made._replace(mask=dense_mask(config, kind, tp, documents, slopes, window))
    if biased:
        slopes = alibi_slopes(config.heads, device, tp) if slopes is None else slopes
    return made._replace(window=window, documents=documents, starts=starts, slopes=slopes if biased else None)


def seen(config: ModelConfig, layer: str, length: int) -> int | None:
    """Tokens that a layer of kind ``layer`` attends to; None: all before it."""
    window = config.window_of(layer)
    return None if window is None or window >= length else window


def rotates(config: ModelConfig, layer: str) -> bool:
    """Whether layers of kind ``layer`` rotate queries and keys."""
    return POSITIONS[config.positions].rotary and "nope" not in layer


def dense_mask(
    config: ModelConfig,
    kind: ActivationSpec,
    tp: Axis,
    documents: Tensor | None,
    slopes: Tensor | None,
    window: int | None = None,
) -> Tensor | None:
    """As AttentionMetadata.mask; only needed for attention dropout, and for ALiBi."""
    length, dtype, device = kind
    mask = None
    if documents is not None:
        mask = causal(length, device) & (documents[:, None, :, None] == documents[:, None, None, :])
    if window is not None:
        near = causal(length, device).triu(1 - window)
        mask = near if mask is None else mask & near
    if POSITIONS[config.positions].slopes:
        bias = alibi(config.heads, length, device, tp, slopes)
        mask = bias.masked_fill(~(causal(length, device) if mask is None else mask), -torch.inf).to(dtype)
    return mask


def block_starts(documents: Tensor, begins: Sequence[int]) -> tuple[int, ...]:
    """Of the blocks of rows that begin there, the first column that has a document of one. [B, T] indices that do not fall."""
    first = documents[:, list(begins)]
    return tuple((documents[:, :, None] < first[:, None, :]).sum(1).amin(0).tolist())


def block_mask(
    kind: ActivationSpec, documents: Tensor | None, window: int | None = None, part: SequencePart | None = None
) -> Any:
    """FlexAttention's mask: causal, inside ``documents`` [B, T] if there are any, and inside a ``window``; of a ``part``'s rows."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows = None if part is None else part.places

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q if rows is None else rows[q]
        mask = q >= k
        if window is not None:
            mask = mask & (q - k < window)
        return mask if documents is None else mask & (documents[b, q] == documents[b, k])

    length, cuda = kind.length, kind.device.type == "cuda"
    create: Any = create_block_mask
    sequences = None if documents is None else len(documents)
    make = partial(create, allowed, sequences, None, length if rows is None else len(rows), length, device=kind.device)
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


def rotary(
    positions: Tensor, config: ModelConfig, layer: str = "full", length: int = 0, rates: Rates | None = None
) -> tuple[Tensor, Tensor]:
    """[T, B] positions -> cosines and sines [T, B, 1, rotated features] (Su et al. 2021, the half-rotation of Llama).

    ``layer``: kind of the layers. ``length``: of the sequences, on which some scalings depend. ``rates``: rotary_rates(), if they
    exist already.
    """
    rate, factor = rates or rotary_rates(config, layer, length, positions.device)
    angles = positions[..., None, None].float() * rate
    angles = torch.cat([angles, angles], -1)
    return (angles.cos(), angles.sin()) if factor == 1.0 else (angles.cos() * factor, angles.sin() * factor)


def rotary_rates(config: ModelConfig, layer: str, length: int, device: torch.device) -> Rates:
    """The frequencies of a kind of layers, and the factor of their cosines and sines."""
    windowed = config.window_of(layer) is not None
    own = config.window_rope_base if windowed else None
    scaling = config.rope_scaling if config.window_rope_scaled or not windowed else {}
    return frequencies(config.rotated, own or config.rope_base, scaling, config.context, length, device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to x [T, B, H, D], to its first features if there are fewer cosines."""
    rotated = cos.shape[-1]
    x, rest = (x, None) if rotated == x.shape[-1] else (x[..., :rotated], x[..., rotated:])
    first, second = x.chunk(2, -1)
    y = x * cos + torch.cat([-second, first], -1) * sin
    return y if rest is None else torch.cat([y, rest], -1)


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
    "rope": PositionKind(rotary=True),
    "alibi": PositionKind(slopes=alibi_slopes),
    "none": PositionKind(),
}
