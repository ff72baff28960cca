"""Context parallelism: a sequence divided over processes, which gather each other's keys and values.

T tokens in a sequence. With causal attention, later tokens attend to more tokens. The sequence is therefore cut into 2 cp pieces, and process r
holds pieces r and 2 cp - 1 - r. So all have equal work (Grattafiori et al. 2024, section 3.3.2).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hpclm.parallel.collectives import gather
from hpclm.parallel.mesh import Axis


class SequencePart(NamedTuple):
    """This process's tokens of each sequence, with context parallelism."""

    axis: Axis
    pieces: tuple[tuple[int, int], ...]
    """Begin and end of each piece."""
    places: Tensor
    """[T / cp] position of each token in the sequence."""

    @classmethod
    def of(cls, axis: Axis, length: int, device: torch.device) -> "SequencePart | None":
        """This process's part of sequences of ``length``; None if it holds them whole."""
        if axis.size == 1:
            return None
        return cls(axis, pieces(axis, length), take(torch.arange(length, device=device), axis))

    def whole(self, x: Tensor) -> Tensor:
        """[T / cp, ...] of every process -> [T, ...] in order; gradients are reduce-scattered."""
        # process r holds pieces r and 2 cp - 1 - r, so the second pieces arrive in reverse
        gathered = gather(x, self.axis).unflatten(0, (self.axis.size, 2, -1))
        return torch.cat([gathered[:, 0], gathered[:, 1].flip(0)]).flatten(0, 1)


def pieces(axis: Axis, length: int) -> tuple[tuple[int, int], ...]:
    """Begin and end of this process's pieces of sequences of ``length``, a multiple of 2 cp."""
    if axis.size == 1:
        return ((0, length),)
    size = length // (2 * axis.size)
    return tuple((n * size, (n + 1) * size) for n in (axis.rank, 2 * axis.size - 1 - axis.rank))


def take(x: Tensor, axis: Axis) -> Tensor:
    """[..., T] -> [..., T / cp], this process's tokens."""
    if axis.size == 1:
        return x
    # in the order of pieces(), which SequencePart.whole relies on
    return torch.cat([x[..., begin:end] for begin, end in pieces(axis, x.shape[-1])], -1)


def row_blocks(held: tuple[tuple[int, int], ...], size: int) -> Iterator[tuple[int, int]]:
    """Split the pieces ``held`` into blocks of at most ``size`` tokens; yields each block's begin and end, in order."""
    for begin, end in held:
        yield from ((at, min(at + size, end)) for at in range(begin, end, size))
