"""What the layers of a model need besides activations: positions, masks, dropout keys, the cache, loss weights and reports.

T tokens in a sequence, t of them on this process, B sequences, H heads of this process.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from hpclm.parallel.sequence import SequencePart


class Cache(Protocol):
    """Keys and values of earlier tokens (see ``model/cache.py``)."""

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Any) -> Tensor:
        """[T, B, H or G, D] queries, keys and values of the new tokens of ``layer`` -> [T, B, H x D]."""
        ...

    def extended(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Store the vectors [T, B, D] of the new tokens of ``layer``; returns those of all tokens, [S, B, D]."""
        ...

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Any) -> Tensor:
        """[T, B, H, D] queries of the new tokens, [S, B, H, D] keys and values of all -> [T, B, H x D]."""
        ...


class LayerContext(NamedTuple):
    """Positions and masks of a micro-batch, computed once for each kind of layer."""

    positions: Tensor | None
    """[B or 1, t] if they restart inside a sample, or this process holds a part; None: 0 .. T-1."""
    mask: Tensor | None
    """[B or 1, 1 or H, T, T]: True where attention is allowed, or values to add to the scores; None: causal."""
    cos: Tensor | None
    """[T, B or 1, 1, rotated features], for rotary positions."""
    sin: Tensor | None
    seed: int | None = None
    """Dropout seed in this micro-batch; None without dropout."""
    flex: "Flex | None" = None
    """For FlexAttention, in place of a mask."""
    keys: Tensor | None = None
    """[DROPOUT_SITES] int64 keys of the current layer for counter-based dropout; None: PyTorch's generator."""
    cache: Cache | None = None
    """Keys and values of earlier tokens, in generation."""
    window: int | None = None
    """Number of tokens that a token attends to, itself included. Like the next three fields, set only if ``mask`` is None."""
    documents: Tensor | None = None
    """[B, T] the document of each token; attention does not cross documents."""
    starts: tuple[int, ...] | None = None
    """For each block of queries, the index of the first key in the same documents; see block_starts()."""
    slopes: Tensor | None = None
    """[H] slopes of ALiBi."""
    part: SequencePart | None = None
    """The part of each sequence that this process holds; None: all."""
    weights: Tensor | None = None
    """[t, B] fp32 weights of this process's tokens in the loss; None without a loss."""
    reports: "Reports | None" = None
    """Receives the layer's reports (``model/reports.py``)."""


class Reports:
    """The reports of one layer on one micro-batch.

    Not a dict: libraries that wrap a layer unpack dicts and tuples among its arguments, and may pass copies.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}


class Flex(NamedTuple):
    """A micro-batch's masks for FlexAttention, which needs no [T, T] tensor."""

    blocks: Any
    """BlockMask: the blocks of 128 x 128 scores with any allowed score, and the allowed scores in them."""
    slopes: Tensor | None
    """[H] ALiBi slopes of this process's heads."""
    rows: Tensor | None = None
    """See SequencePart.places."""
    alone: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] | None = None
    """Compiles FlexAttention separately; None: it is compiled with its block."""
