"""Positions, masks, documents, windows and sequence parts of a micro-batch, computed once for each kind of layer.

T tokens in a sequence, t of them on this process, B sequences, H heads of this process.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hpclm.config import ModelConfig
from hpclm.model.attention.backend import flexible
from hpclm.model.compiled import StackCompilation, failures
from hpclm.model.position import POSITIONS, Rates, alibi, alibi_slopes, rotary, rotary_rates, rotates
from hpclm.parallel.mesh import Axis
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.parallel.sequence import SequencePart, pieces, row_blocks

ROWS_PER_BLOCK = 128  # rows of scores computed together


class Cache(Protocol):
    """Keys and values of earlier tokens (see ``model/cache.py``)."""

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Any) -> Tensor:
        """[T, B, H or G, D] queries, keys and values of the new tokens of ``layer`` -> [T, B, H x D]."""
        ...


class AttentionMetadata(NamedTuple):
    """Positions and masks of a micro-batch, computed once for each kind of layer."""

    positions: Tensor | None
    """[B or 1, t] if positions restart inside a sample, or this process holds a part; None: 0 .. T-1."""
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
    """Number of tokens that a token attends to, itself included. Replaces a mask, like the next three fields."""
    documents: Tensor | None = None
    """[B, T] the document of each token; attention does not cross documents."""
    starts: tuple[int, ...] | None = None
    """For each block of rows, the first column of its documents."""
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
    """Compiles FlexAttention separately; None: FlexAttention is compiled with its block."""


class ActivationSpec(NamedTuple):
    """Length, type and device of the activations of a micro-batch."""

    length: int
    """Tokens in a sequence."""
    dtype: torch.dtype
    device: torch.device


class Prepared(NamedTuple):
    """Precomputed inputs for attention metadata."""

    slopes: Tensor | None = None
    """ALiBi slopes."""
    flex: "Flex | None" = None
    """Replaces a mask."""
    starts: tuple[int, ...] | None = None
    """See AttentionMetadata.starts, and .part for the next field."""
    part: SequencePart | None = None
    rates: Rates | None = None
    """rotary_rates()."""


class Layouts:
    """Computes the layouts of a stack's micro-batches. Parts that all micro-batches share are computed once: a copy from the host in
    every micro-batch would wait for the device."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        layers: Sequence[str],
        mesh: tuple[Axis, Axis],
        compilation: StackCompilation,
    ):
        """``layers``: kinds of the layers. ``mesh``: the tensor-parallel and the context-parallel axis."""
        self.config = config
        self.dtype = dtype
        self.layers = tuple(dict.fromkeys(layers))
        self.compilation = compilation
        self.tp, self.cp = mesh
        self._made: dict[Any, Any] = {}

    def of(self, batch: MicroBatch) -> dict[str, AttentionMetadata]:
        """The layout of a micro-batch for each kind of layer."""
        length = batch.tokens.shape[1] * self.cp.size
        device = batch.tokens.device
        kind = ActivationSpec(length, self.dtype, device)
        part = self._once(("part", kind), lambda: SequencePart.of(self.cp, length, device))
        starts = self._starts(kind, batch.documents)
        make_slopes = POSITIONS[self.config.positions].slopes
        slopes = make_slopes and self._once(
            ("slopes", device), partial(make_slopes, self.config.attention.heads, device, self.tp)
        )
        weights = batch.weights
        if weights is not None:
            # this rank's slice of the sequence between layers, as scatter() divides it
            weights = weights.t().chunk(self.tp.size)[self.tp.rank]
        # layers with the same window share a mask; only documents change it from one micro-batch to the next
        masks = cache(partial(self._block_mask, kind, batch.documents, part))
        layouts = {}
        for layer in self.layers:
            window = seen(self.config, layer, length)
            flex = None
            special = (batch.documents, slopes, window) != (None, None, None)
            if self._is_flexible(device, special, part):
                run = None if self.compilation.works else self.compilation.attention_alone
                flex = Flex(masks(window), slopes, None if part is None else part.places, run)
            prepared = Prepared(slopes, flex, starts, part, self._rates(kind, layer))
            layout = attention_metadata(self.config, kind, self.tp, batch, layer, prepared)
            layouts[layer] = layout._replace(weights=weights)
        return layouts

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The cached result of ``make`` for ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _starts(self, kind: ActivationSpec, documents: Tensor | None) -> tuple[int, ...] | None:
        """For each block of rows, the first column of its documents. None on a GPU, even a simulated one, which would wait; None in
        compiled layers, which would be recompiled for other numbers."""
        reads = kind.device.type == "cpu" and not torch.cuda.is_available()
        if documents is None or not reads or self.compilation.works:
            return None
        return block_starts(documents, [begin for begin, _ in row_blocks(pieces(self.cp, kind.length), ROWS_PER_BLOCK)])

    def _is_flexible(self, device: torch.device, special: bool, part: SequencePart | None) -> bool:
        """Whether FlexAttention computes a kind of layer. ``special``: it has documents, slopes or a window."""
        # uncompiled, scaled_dot_product_attention computes parts of sequences piece by piece
        alone = self.compilation.compiles_attention and (special or part is None)
        return flexible(self.config, self.compilation.works or alone, device, special or part is not None)

    def _block_mask(
        self, kind: ActivationSpec, documents: Tensor | None, part: SequencePart | None, window: int | None
    ) -> Any:
        """See block_mask(); cached if there are no documents."""
        make = partial(block_mask, kind, documents, window, part)
        if documents is not None:
            return make()
        return self._once((kind, window), make)

    def _rates(self, kind: ActivationSpec, layer: str) -> Rates | None:
        """Rotary rates, cached because longrope's are copied from the host."""
        if not rotates(self.config, layer):
            return None
        make = partial(rotary_rates, self.config, layer, kind.length, kind.device)
        rates: Rates = self._once(("rates", kind, layer), make)
        return rates


def attention_metadata(
    config: ModelConfig,
    kind: ActivationSpec,
    tp: Axis,
    batch: MicroBatch,
    layer: str = "full",
    prepared: Prepared = Prepared(),  # noqa: B008 - it is a tuple
) -> AttentionMetadata:
    """The layout of a micro-batch for layers of kind ``layer``."""
    positions = batch.positions
    documents = batch.documents
    slopes, flex, starts, part, rates = prepared
    length, dtype, device = kind
    window = seen(config, layer, length)
    cos = None
    sin = None
    if part is not None and positions is None:
        positions = part.places[None]
    if rotates(config, layer):
        places = torch.arange(length, device=device)[:, None] if positions is None else positions.t()
        # rounded only here: bf16 has 8 bits of precision, so positions above 256 would coincide
        cos, sin = (x.to(dtype) for x in rotary(places, config, layer, length, rates))
    metadata = AttentionMetadata(positions, None, cos, sin, batch.seed, flex, part=part)
    biased = POSITIONS[config.positions].slopes is not None
    if flex:
        return metadata._replace(window=window, documents=documents)
    if config.attention.dropout or (biased and (documents, window, part) == (None, None, None)):
        return metadata._replace(mask=dense_mask(config, kind, tp, documents, slopes, window))
    if biased and slopes is None:
        slopes = alibi_slopes(config.attention.heads, device, tp)
    return metadata._replace(window=window, documents=documents, starts=starts, slopes=slopes)


def seen(config: ModelConfig, layer: str, length: int) -> int | None:
    """Number of tokens that a layer of kind ``layer`` attends to; None: all earlier ones."""
    window = config.attention.window_of(layer)
    return None if window is None or window >= length else window


def dense_mask(
    config: ModelConfig,
    kind: ActivationSpec,
    tp: Axis,
    documents: Tensor | None,
    slopes: Tensor | None,
    window: int | None = None,
) -> Tensor | None:
    """See AttentionMetadata.mask; only needed for attention dropout and ALiBi."""
    length, dtype, device = kind
    biased = POSITIONS[config.positions].slopes is not None
    if documents is None and window is None and not biased:
        return None
    mask = causal(length, device)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    if window is not None:
        mask = mask.triu(1 - window)
    if biased:
        bias = alibi(config.attention.heads, length, device, tp, slopes)
        return bias.masked_fill(~mask, -torch.inf).to(dtype)
    return mask


def block_starts(documents: Tensor, begins: Sequence[int]) -> tuple[int, ...]:
    """For the blocks of rows that begin at ``begins``, the first columns of their documents. ``documents``: [B, T], non-decreasing."""
    first = documents[:, list(begins)]
    return tuple((documents[:, :, None] < first[:, None, :]).sum(1).amin(0).tolist())


def block_mask(
    kind: ActivationSpec, documents: Tensor | None, window: int | None = None, part: SequencePart | None = None
) -> Any:
    """FlexAttention's mask: causal, within ``documents`` [B, T] if given, within a ``window``, and for the rows of a ``part``."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows = None if part is None else part.places

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if rows is not None:
            q = rows[q]
        mask = q >= k
        if window is not None:
            mask = mask & (q - k < window)
        if documents is not None:
            mask = mask & (documents[b, q] == documents[b, k])
        return mask

    length = kind.length
    cuda = kind.device.type == "cuda"
    create: Any = create_block_mask
    sequences = None if documents is None else len(documents)
    make = partial(create, allowed, sequences, None, length if rows is None else len(rows), length, device=kind.device)
    if not cuda:
        return make()
    try:
        # uncompiled, create_block_mask evaluates the mask as a [B, T, T] tensor
        return make(_compile=True)
    except failures():  # blocks then cannot be compiled either, and the next micro-batch uses a dense mask
        return make()


def causal(length: int, device: torch.device) -> Tensor:
    """[1, 1, T, T]: True where the row's token may attend to the column's."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
