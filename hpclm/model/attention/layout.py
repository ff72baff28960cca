"""Positions, masks, documents, windows and sequence parts of a micro-batch, computed once for each kind of layer.

T tokens in a sequence, t of them on this process, B sequences, H heads of this process.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.config.layer import Layer
from hpclm.model.attention.backend import flexible
from hpclm.model.compiled import StackCompilation, failures
from hpclm.model.context import Flex, LayerContext
from hpclm.model.position import POSITIONS, Rates, alibi, alibi_slopes, rotary, rotary_rates
from hpclm.parallel.mesh import Axis
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.parallel.sequence import SequencePart, pieces, row_blocks

ROWS_PER_BLOCK = 128  # rows of scores computed together


class ActivationSpec(NamedTuple):
    """Length, type and device of the activations of a micro-batch."""

    length: int
    """Tokens in a sequence."""
    dtype: torch.dtype
    device: torch.device


class Prepared(NamedTuple):
    """Precomputed inputs for layer_context()."""

    slopes: Tensor | None = None
    """ALiBi slopes."""
    flex: "Flex | None" = None
    """Replaces a mask."""
    starts: tuple[int, ...] | None = None
    """See LayerContext; likewise ``part``."""
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
        layers: Sequence[Layer],
        mesh: tuple[Axis, Axis],
        compilation: StackCompilation,
    ):
        """``layers``: the blocks. ``mesh``: the tensor-parallel and the context-parallel axis."""
        self.config = config
        self.dtype = dtype
        self.layers = tuple(dict.fromkeys(layers))
        self.compilation = compilation
        self.tp, self.cp = mesh
        self._made: dict[Any, Any] = {}

    def of(self, batch: MicroBatch) -> dict[Layer, LayerContext]:
        """The layout of a micro-batch for each block; shared by those with the same window and rotary positions."""
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
        views = {}
        for layer in self.layers:
            if (layer.window, layer.rope) in views:
                continue
            window = seen(layer, length)
            flex = None
            special = (batch.documents, slopes, window) != (None, None, None)
            if self._is_flexible(device, special, part):
                run = None if self.compilation.works else self.compilation.attention_alone
                flex = Flex(masks(window), slopes, None if part is None else part.places, run)
            prepared = Prepared(slopes, flex, starts, part, self._rates(kind, layer))
            layout = layer_context(self.config, kind, self.tp, batch, layer, prepared)
            views[layer.window, layer.rope] = layout._replace(weights=weights)
        return {layer: views[layer.window, layer.rope] for layer in self.layers}

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

    def _rates(self, kind: ActivationSpec, layer: Layer) -> Rates | None:
        """Rotary rates, cached because longrope's are copied from the host."""
        if layer.rope is None:
            return None
        make = partial(rotary_rates, self.config, layer.rope, kind.length, kind.device)
        rates: Rates = self._once(("rates", kind, layer.rope), make)
        return rates


def layer_context(
    config: ModelConfig,
    kind: ActivationSpec,
    tp: Axis,
    batch: MicroBatch,
    layer: Layer | None = None,
    prepared: Prepared = Prepared(),  # noqa: B008 - it is a tuple
) -> LayerContext:
    """The layout of a micro-batch for ``layer``; None: the first of ``config``."""
    layer = layer or config.blocks[0]
    positions = batch.positions
    documents = batch.documents
    slopes, flex, starts, part, rates = prepared
    length, dtype, device = kind
    window = seen(layer, length)
    cos = None
    sin = None
    if part is not None and positions is None:
        positions = part.places[None]
    if layer.rope is not None:
        places = torch.arange(length, device=device)[:, None] if positions is None else positions.t()
        # rounded only here: bf16 has 8 bits of precision, so positions above 256 would coincide
        cos, sin = (x.to(dtype) for x in rotary(places, config, layer.rope, length, rates))
    context = LayerContext(positions, None, cos, sin, batch.seed, flex, part=part)
    biased = POSITIONS[config.positions].slopes is not None
    if flex:
        return context._replace(window=window, documents=documents)
    if config.attention.dropout or (biased and (documents, window, part) == (None, None, None)):
        return context._replace(mask=dense_mask(config, kind, tp, documents, slopes, window))
    if biased:
        slopes = alibi_slopes(config.attention.heads, device, tp) if slopes is None else slopes
    return context._replace(window=window, documents=documents, starts=starts, slopes=slopes if biased else None)


def seen(layer: Layer, length: int) -> int | None:
    """Number of tokens that ``layer`` attends to in sequences of this length; None: all earlier ones."""
    return None if layer.window is None or layer.window >= length else layer.window


def dense_mask(
    config: ModelConfig,
    kind: ActivationSpec,
    tp: Axis,
    documents: Tensor | None,
    slopes: Tensor | None,
    window: int | None = None,
) -> Tensor | None:
    """See LayerContext.mask; only needed for attention dropout and ALiBi."""
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
