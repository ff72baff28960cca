"""Positions, windows, documents and sequence parts of a micro-batch, computed once for each kind of layer.

T tokens in a sequence, t of them on this process, B sequences, H heads of this process.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.config.layer import Layer
from hpclm.config.rope import RopeConfig
from hpclm.model.attention.backend import flexible
from hpclm.model.compiled import StackCompilation
from hpclm.model.context import Flex, LayerContext
from hpclm.model.position import POSITIONS, rotary, rotary_rates
from hpclm.parallel.mesh import Axis
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.parallel.sequence import SequencePart, pieces, row_blocks

ROWS_PER_BLOCK = 128  # rows of scores computed together


def visible(rows: Tensor, columns: Tensor, window: int | None, documents: tuple[Tensor, Tensor] | None) -> Tensor:
    """True where the tokens ``rows`` attend to the tokens ``columns``: to themselves and earlier ones, of the last ``window``, in the
    same document. ``documents``: those of the rows and of the columns. All are broadcast."""
    allowed = columns <= rows
    if window is not None:
        allowed = allowed & (columns > rows - window)
    if documents is not None:
        allowed = allowed & (documents[0] == documents[1])
    return allowed


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
        documents = batch.documents
        part = self._once(("part", length, device), lambda: SequencePart.of(self.cp, length, device))
        positions = batch.positions
        if part is not None and positions is None:
            positions = part.places[None]
        make_slopes = POSITIONS[self.config.positions].slopes
        slopes = make_slopes and self._once(
            ("slopes", device), partial(make_slopes, self.config.attention.heads, device, self.tp)
        )
        weights = batch.weights
        if weights is not None:
            # this rank's slice of the sequence between layers, as scatter() divides it
            weights = weights.t().chunk(self.tp.size)[self.tp.rank]
        shared = LayerContext(
            positions=positions,
            seed=batch.seed,
            documents=documents,
            starts=self._starts(length, documents),
            slopes=slopes,
            part=part,
            weights=weights,
        )
        # layers with the same window share a mask; only documents change it from one micro-batch to the next
        masks = cache(partial(self._block_mask, length, device, documents, part))
        views: dict[Any, LayerContext] = {}
        for layer in self.layers:
            kind = layer.window, layer.rope
            if kind in views:
                continue
            cos, sin = self._rotations(layer.rope, positions, length, device)
            window = None if layer.window is None or layer.window >= length else layer.window
            view = shared._replace(cos=cos, sin=sin, window=window)
            if self._is_flexible(device, view):
                run = None if self.compilation.layers else self.compilation.attention_alone
                flex = Flex(masks(window), slopes, None if part is None else part.places, run)
                view = view._replace(flex=flex)
            views[kind] = view
        return {layer: views[layer.window, layer.rope] for layer in self.layers}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The cached result of ``make`` for ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _starts(self, length: int, documents: Tensor | None) -> tuple[int, ...] | None:
        """For each block of rows, the first column of its documents. None on a GPU, even a simulated one, which would wait; None in
        compiled layers, which would be recompiled for other numbers."""
        if documents is None or documents.is_cuda or torch.cuda.is_available() or self.compilation.layers:
            return None
        return block_starts(documents, [begin for begin, _ in row_blocks(pieces(self.cp, length), ROWS_PER_BLOCK)])

    def _is_flexible(self, device: torch.device, view: LayerContext) -> bool:
        """Whether FlexAttention computes a kind of layer."""
        # uncompiled, scaled_dot_product_attention computes parts of sequences piece by piece
        alone = self.compilation.may_compile_attention and (not view.plain or view.part is None)
        masked = not view.plain or view.part is not None
        return flexible(self.config, self.compilation.layers or alone, device, masked)

    def _block_mask(
        self,
        length: int,
        device: torch.device,
        documents: Tensor | None,
        part: SequencePart | None,
        window: int | None,
    ) -> Any:
        """See block_mask(); cached if there are no documents."""
        make = partial(block_mask, length, device, documents, window, part)
        if documents is not None:
            return make()
        return self._once(("mask", length, device, window), make)

    def _rotations(
        self, rope: RopeConfig | None, positions: Tensor | None, length: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines; see LayerContext."""
        if rope is None:
            return None, None
        places = torch.arange(length, device=device)[:, None] if positions is None else positions.t()
        # cached because longrope's are copied from the host
        rates = self._once(("rates", length, device, rope), partial(rotary_rates, self.config, rope, length, device))
        cos, sin = rotary(places, self.config, rope, length, rates)
        # rounded only here: bf16 has 8 bits of precision, so positions above 256 would coincide
        return cos.to(self.dtype), sin.to(self.dtype)


def block_starts(documents: Tensor, begins: Sequence[int]) -> tuple[int, ...]:
    """For the blocks of rows that begin at ``begins``, the first columns of their documents. ``documents``: [B, T], non-decreasing."""
    first = documents[:, list(begins)]
    return tuple((documents[:, :, None] < first[:, None, :]).sum(1).amin(0).tolist())


def block_mask(
    length: int,
    device: torch.device,
    documents: Tensor | None = None,
    window: int | None = None,
    part: SequencePart | None = None,
) -> Any:
    """FlexAttention's mask: causal, within ``documents`` [B, T] if given, within a ``window``, and for the rows of a ``part``."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows = None if part is None else part.places

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if rows is not None:
            q = rows[q]
        return visible(q, k, window, None if documents is None else (documents[b, q], documents[b, k]))

    create: Any = create_block_mask
    sequences = None if documents is None else len(documents)
    # uncompiled, create_block_mask evaluates the mask as a [B, T, T] tensor
    compiled = {"_compile": True} if device.type == "cuda" else {}
    return create(allowed, sequences, None, length if rows is None else len(rows), length, device=device, **compiled)
