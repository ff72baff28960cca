"""Caches keys and values of earlier tokens, so that generating a token computes only that token.

T new tokens of each sequence, S slots in use, B sequences, D size of one head; H query heads, G key/value heads. Sequences of different
lengths are padded on the left, so that all continue in the same slot.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpclm.config import ModelConfig
from hpclm.config.layer import Layer
from hpclm.config.rope import RopeConfig
from hpclm.model.attention.scores import PLAIN, Scores, dot_product_attention
from hpclm.model.context import LayerContext
from hpclm.model.position import POSITIONS, rotary, scaling_length


class KeyValueCache:
    """The keys and values of one batch, for every attention layer of a model on one process."""

    def __init__(
        self, config: ModelConfig, lengths: Sequence[int], room: int, dtype: torch.dtype, device: torch.device
    ):
        """``lengths``: tokens of each sequence in the first forward pass. ``room``: maximum number of slots."""
        longest = max(lengths)
        self.config = config
        self.layers = tuple(dict.fromkeys(config.blocks))
        self.room = max(room, longest)
        self.used = 0
        self._first = 0
        self._kept: dict[nn.Module, tuple[Tensor, ...]] = {}
        self._slots = torch.arange(self.room, device=device)
        self._pads: Tensor | None = None  # [B, 1]
        if min(lengths) < longest:
            self._pads = torch.tensor([[longest - length] for length in lengths], device=device)
        self._slopes: Tensor | None = None  # [1, H, 1, 1]
        slopes = POSITIONS[config.positions].slopes
        if slopes:
            self._slopes = slopes(config.attention.heads, device)[None, :, None, None]
        self._missing = [longest - length for length in lengths]  # each sequence's slots in use minus its tokens
        self._scaled_for: list[int] = []  # scaling_length() of each sequence when its keys were rotated
        self._rotary: dict[tuple[RopeConfig, int], tuple[Tensor, Tensor]] = {}
        self.dtype = dtype

    @property
    def extensible(self) -> bool:
        """Whether one more token fits: a slot is free, and the token does not change the rotation of earlier keys."""
        return self.used < self.room and self._scaling_lengths(self.used + 1) == self._scaled_for

    def extend(self, count: int) -> dict[Layer, LayerContext]:
        """Allocate the next ``count`` slots; returns, for each block, the positions and mask of the tokens in them.

        The first call is for the whole prompt, each later one for a single token.
        """
        self._first = self.used
        self.used = self.used + count
        self._scaled_for = self._scaling_lengths(self.used)
        positions = self._slots[None, self._first : self.used]
        if self._pads is not None:
            # padding on the left has no position; it is masked, and 0 is always valid
            positions = (positions - self._pads).clamp(min=0)
        views = {}
        for layer in self.layers:
            if (layer.window, layer.rope) not in views:
                cos, sin = (None, None) if layer.rope is None else self._rotations(layer.rope, positions)
                mask = self._mask(layer.window)
                views[layer.window, layer.rope] = LayerContext(positions, mask, cos, sin, cache=self)
        return {layer: views[layer.window, layer.rope] for layer in self.layers}

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these sequences of the batch."""
        index = torch.tensor(rows, device=self._slots.device)
        self._kept = {layer: tuple(x[index] for x in kept) for layer, kept in self._kept.items()}
        self._pads = None if self._pads is None else self._pads[index]
        self._missing, self._scaled_for = (
            [values[row] for row in rows] for values in (self._missing, self._scaled_for)
        )

    def attend(
        self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Scores = PLAIN
    ) -> Tensor:
        """Queries, keys and values of the new tokens, [T, B, H or G, D] -> [T, B, H x D]; they attend to all earlier tokens."""
        k, v = (z.permute(1, 2, 0, 3) for z in (k, v))
        k, v = self._stored(layer, k, v)
        return self._attended(q.permute(1, 2, 0, 3), k, v, mask, how)

    def extended(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Store the vectors [T, B, D] of the new tokens of ``layer``; returns those of all tokens, [S, B, D]."""
        [kept] = self._stored(layer, x.transpose(0, 1)[:, None])
        return kept[:, 0].transpose(0, 1)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Scores = PLAIN) -> Tensor:
        """[T, B, H, D] queries of the new tokens, [S, B, H, D] keys and values of all -> [T, B, H x D]."""
        q, k, v = (z.permute(1, 2, 0, 3) for z in (q, k, v))
        return self._attended(q, k, v, mask, how)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Scores) -> Tensor:
        """[B, H or G, T or S, D] -> [T, B, H x D]."""
        if q.shape[2] > 1 or not how.plain:
            if mask is None and not how.plain and q.shape[2] > 1:
                mask = self._slots[: self.used] <= self._slots[self._first : self.used, None]
            return dot_product_attention(q, k, v, mask, how).permute(2, 0, 1, 3).flatten(2)
        # a single token needs no causal order, so the queries of a group take the place of a sequence
        q = q.reshape(len(q), k.shape[1], -1, q.shape[3])  # [B, G, H/G, D]
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(len(mask), k.shape[1], -1, mask.shape[3])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=how.scale).reshape(1, len(q), -1)

    def _scaling_lengths(self, used: int) -> list[int]:
        """scaling_length() of each sequence when ``used`` slots are in use."""
        scaling = self.config.rope.scaling
        context = self.config.context
        return [scaling_length(scaling, context, used - missing) for missing in self._missing]

    def _rotations(self, rope: RopeConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B or 1, T] positions -> cosines and sines [T, B or 1, 1, rotated features]."""
        if len(set(self._scaled_for)) == 1:
            cos, sin = (table[positions.t()] for table in self._table(rope, self._scaled_for[0]))
            return cos, sin
        rows = positions.expand(len(self._scaled_for), -1)
        tables = [self._table(rope, length) for length in self._scaled_for]
        cos, sin = (
            torch.stack([table[row] for table, row in zip(kind, rows, strict=True)], 1)
            for kind in zip(*tables, strict=True)
        )
        return cos, sin

    def _table(self, rope: RopeConfig, length: int) -> tuple[Tensor, Tensor]:
        """[room, 1, rotated features] cosines and sines of all slots, in sequences of ``length`` tokens."""
        if (rope, length) not in self._rotary:
            cos, sin = rotary(self._slots[:, None], self.config, rope, length)
            self._rotary[rope, length] = cos[:, 0].to(self.dtype), sin[:, 0].to(self.dtype)
        return self._rotary[rope, length]

    def _stored(self, layer: nn.Module, *new: Tensor) -> tuple[Tensor, ...]:
        """Store [B, G, T, D] tensors of the new tokens, such as keys and values; returns those of all tokens, [B, G, S, D]."""
        if layer not in self._kept:
            # all slots at once: growing by concatenation would copy everything for every token
            self._kept[layer] = tuple(x.new_empty(*x.shape[:2], self.room, x.shape[3]) for x in new)
        kept = self._kept[layer]
        for slots, x in zip(kept, new, strict=True):
            slots[:, :, self._first : self.used] = x
        return tuple(slots[:, :, : self.used] for slots in kept)

    def _mask(self, window: int | None) -> Tensor | None:
        """[B or 1, 1 or H, T, S] for the new tokens: True where attention is allowed, or values to add to the scores.

        None: causal for several tokens; no mask for one token.
        """
        rows = self._slots[self._first : self.used, None]
        columns = self._slots[: self.used]
        seen = None
        if self._pads is not None:
            seen = (columns >= self._pads)[:, None, None, :]
            if len(rows) > 1:
                seen = (seen & (columns <= rows)) | (columns == rows)  # padding attends to itself, or it would be NaN
        if window is not None and window < self.used:
            near = (columns <= rows) & (columns > rows - window)
            seen = near[None, None] if seen is None else seen & near
        if self._slopes is None:
            return seen
        if seen is None:
            seen = columns <= rows
        return (self._slopes * (columns - rows)).masked_fill(~seen, -torch.inf).to(self.dtype)
