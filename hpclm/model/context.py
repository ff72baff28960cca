"""What the layers of a model need besides activations: positions, documents, dropout keys, the cache, loss weights and reports.

T tokens in a sequence, t of them on this process, B sequences, H heads of this process.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from hpclm.parallel.sequence import SequencePart


class Cache(Protocol):
    """Tensors of earlier tokens, such as keys and values (see ``model/cache.py``)."""

    def stored(self, layer: nn.Module, *new: Tensor) -> tuple[Tensor, ...]:
        """Store tensors [T, B, ..., D] of the new tokens of ``layer``; returns those of all tokens, [S, B, ..., D]."""
        ...


class LayerContext(NamedTuple):
    """Positions, and what the tokens of a micro-batch attend to, computed once for each kind of layer."""

    positions: Tensor | None = None
    """[B or 1, t] if they restart inside a sample, or this process holds a part; None: 0 .. T-1."""
    cos: Tensor | None = None
    """[T, B or 1, 1, rotated features], for rotary positions."""
    sin: Tensor | None = None
    seed: int | None = None
    """Dropout seed in this micro-batch; None without dropout."""
    flex: "Flex | None" = None
    """For FlexAttention."""
    keys: Tensor | None = None
    """[DROPOUT_SITES] int64 keys of the current layer for counter-based dropout; None: PyTorch's generator."""
    cache: Cache | None = None
    """Tensors of earlier tokens, in generation."""
    window: int | None = None
    """Number of tokens that a token attends to, itself included."""
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

    @property
    def plain(self) -> bool:
        """Whether each token attends to all earlier ones, by unbiased scores."""
        return self.window is None and self.documents is None and self.slopes is None


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
