"""Caches keys and values of earlier tokens, so that generating a token computes only that token.

T new tokens of each sequence, S slots in use, B sequences. Sequences of different lengths are padded on the left, so that all continue in
the same slot.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hpclm.config import ModelConfig
from hpclm.config.layer import Layer
from hpclm.config.rope import RopeConfig
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
        slopes = POSITIONS[config.positions].slopes
        self._slopes = slopes and slopes(config.attention.heads, device)
        self._missing = [longest - length for length in lengths]  # each sequence's slots in use minus its tokens
        self._scaled_for: list[int] = []  # scaling_length() of each sequence when its keys were rotated
        self._rotary: dict[tuple[RopeConfig, int], tuple[Tensor, Tensor]] = {}
        self.dtype = dtype

    @property
    def extensible(self) -> bool:
        """Whether one more token fits: a slot is free, and the token does not change the rotation of earlier keys."""
        return self.used < self.room and self._scaling_lengths(self.used + 1) == self._scaled_for

    def extend(self, count: int) -> dict[Layer, LayerContext]:
        """Allocate the next ``count`` slots; returns the layout of the tokens in them for each block.

        The first call is for the whole prompt, each later one for a single token.
        """
        self._first = self.used
        self.used = self.used + count
        self._scaled_for = self._scaling_lengths(self.used)
        positions = self._slots[None, self._first : self.used]
        documents = None
        if self._pads is not None:
            # padding on the left counts as another document; it has no position, and 0 is always valid
            documents = self._slots[: self.used] >= self._pads
            positions = (positions - self._pads).clamp(min=0)
        shared = LayerContext(positions, cache=self, documents=documents, slopes=self._slopes)
        views = {}
        for layer in self.layers:
            if (layer.window, layer.rope) not in views:
                cos, sin = (None, None) if layer.rope is None else self._rotations(layer.rope, positions)
                window = None if layer.window is None or layer.window >= self.used else layer.window
                views[layer.window, layer.rope] = shared._replace(cos=cos, sin=sin, window=window)
        return {layer: views[layer.window, layer.rope] for layer in self.layers}

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these sequences of the batch."""
        index = torch.tensor(rows, device=self._slots.device)
        self._kept = {layer: tuple(x[index] for x in kept) for layer, kept in self._kept.items()}
        self._pads = None if self._pads is None else self._pads[index]
        self._missing, self._scaled_for = (
            [values[row] for row in rows] for values in (self._missing, self._scaled_for)
        )

    def stored(self, layer: nn.Module, *new: Tensor) -> tuple[Tensor, ...]:
        """Store tensors [T, B, ..., D] of the new tokens, such as keys and values; returns those of all tokens, [S, B, ..., D]."""
        rows = [x.movedim(0, -2) for x in new]  # [B, ..., T, D]
        if layer not in self._kept:
            # all slots at once: growing by concatenation would copy everything for every token
            self._kept[layer] = tuple(x.new_empty(*x.shape[:-2], self.room, x.shape[-1]) for x in rows)
        kept = self._kept[layer]
        for slots, x in zip(kept, rows, strict=True):
            slots[..., self._first : self.used, :] = x
        return tuple(slots[..., : self.used, :].movedim(-2, 0) for slots in kept)

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
