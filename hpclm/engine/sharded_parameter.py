"""The weights as an optimizer sees them: which values of each logical tensor this process holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from hpclm.parallel.mesh import SINGLE, Axis
from hpclm.parallel.placement import Placement


@dataclass(frozen=True)
class ShardedParameter:
    """One weight as the optimizer sees it: a run of values of this process's tensor-parallel slice, flattened."""

    name: str
    """Logical name."""
    parameter: nn.Parameter
    """What the optimizer updates: the whole slice, or the part of it that this process keeps."""
    placement: Placement
    begin: int = 0
    """Index in the flattened slice of the first value that this process holds."""
    values: int | None = None
    """How many it holds; None: all of ``parameter``, which has no padding then."""
    replicas: Axis = SINGLE
    """The ranks of the data axis that hold the same values; they share the work of saving and loading them."""
    local_range: Callable[[int], tuple[int, int]] | None = None
    """Rank of mesh.shard -> index of the first value that it holds, and how many it holds; None: each rank holds all."""
    holders: Axis | None = None
    """The processes of mesh.shard and mesh.tp that together hold one copy of it; None: those of mesh.tp."""
    duplicate: bool = False
    """Whether another pipeline stage holds it too, and that stage saves and counts it."""
    data_rank: int = 0
    """This process's, on the whole data axis: it says which part of a weight it holds that data-parallel ranks split."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole weight."""
        return self.placement.shape

    @property
    def count(self) -> int:
        """How many values this process holds."""
        return self.parameter.numel() if self.values is None else self.values


def blocks(weight: ShardedParameter, begin: int, values: Tensor, tp: Axis) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The blocks of the whole weight that ``run``, flattened values of the slice from ``begin`` on, consists of: the offset of each in the
    whole weight, and a view of it."""
    placement, used = weight.placement, 0
    dim = placement.dim
    pieces = list(placement.pieces(tp, weight.data_rank))
    for start, size in rectangles(placement.local(tp), begin, begin + values.numel()):
        block = values[used : used + prod(size)].view(size)
        used += block.numel()
        # more than one piece where parts of a weight are split separately: a block may reach from the gate into up
        for piece in pieces:
            whole, part = [low + at for low, at in zip(start, piece.start, strict=True)], block
            if dim is not None and tp.size > 1:
                low, high = max(start[dim], piece.offset), min(start[dim] + size[dim], piece.offset + piece.size[dim])
                if low >= high:
                    continue
                whole[dim] = piece.start[dim] + low - piece.offset
                part = block.narrow(dim, low - start[dim], high - low)
            yield tuple(whole), part


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Start and size of the blocks that the values ``begin`` to ``end`` of a flattened tensor of ``shape`` consist of, in order:
    the rest of a row, whole rows, and the beginning of a row."""
    if len(shape) <= 1:
        if begin < end:
            yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row = prod(shape[1:])
    while begin < end:
        first, rows = begin // row, (end - begin) // row
        if begin % row == 0 and rows:
            yield (first, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            begin += rows * row
            continue
        until = min(end, (first + 1) * row)
        for start, size in rectangles(shape[1:], begin - first * row, until - first * row):
            yield (first, *start), (1, *size)
        begin = until
