"""The weights as an optimizer sees them: which values of each logical tensor this process holds."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from hpclm.parallel.mesh import SINGLE, Axis, Mesh
from hpclm.parallel.placement import Placement


@dataclass(frozen=True)
class ShardedParameter:
    """One weight as the optimizer sees it: a run of values of this process's flattened tensor-parallel slice."""

    name: str
    """Logical name."""
    parameter: nn.Parameter
    """The whole slice, or this process's part of it; the optimizer updates it if it requires a gradient."""
    placement: Placement
    begin: int = 0
    """Index of this process's first value in the flattened slice."""
    values: int | None = None
    """Number of values that this process holds; None: all of ``parameter``, without padding."""
    replicas: Axis = SINGLE
    """The ranks of the data axis with the same values; they divide the work of saving and loading them."""
    local_range: Callable[[int], tuple[int, int]] | None = None
    """Rank of mesh.shard -> index of its first value, and number of its values; None: each rank holds all."""
    holders: Axis | None = None
    """The processes of mesh.shard and mesh.tp that together hold one copy of the weight; None: the processes of mesh.tp."""
    duplicate: bool = False
    """Whether another pipeline stage also holds the weight, and saves and counts it."""
    data_rank: int = 0
    """This process's rank on the full data axis; selects its part of weights split across data-parallel ranks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        return self.placement.shape

    @property
    def trained(self) -> bool:
        """Whether the optimizer updates it; False for a frozen weight."""
        return self.parameter.requires_grad

    @property
    def count(self) -> int:
        """Number of values that this process holds."""
        return self.parameter.numel() if self.values is None else self.values


Homes = list[tuple[Mesh, list[nn.Parameter]]]
"""Trained weights grouped by the ranks that hold them, each group with its mesh (Mesh.of_weights)."""


def whole_slices(
    named: Iterable[tuple[str, nn.Parameter]], placements: Mapping[str, Placement], mesh: Mesh
) -> tuple[list[ShardedParameter], Homes]:
    """The weights in order, of which the optimizer updates whole slices; and the groups of the trained ones, those held by all ranks
    first. A collective over ``mesh.dp``."""
    named = list(named)
    meshes = {
        count: mesh.of_weights(count) for count in sorted({1, *(placements[name].data_ranks for name, _ in named)})
    }
    weights = []
    members: dict[int, list[nn.Parameter]] = {count: [] for count in meshes}
    for name, p in named:
        placement = placements[name]
        replicas = meshes[placement.data_ranks].dp
        weights.append(ShardedParameter(name, p, placement, replicas=replicas, data_rank=mesh.dp.rank))
        if p.requires_grad:
            members[placement.data_ranks].append(p)
    return weights, [(meshes[count], parameters) for count, parameters in members.items()]


def blocks(weight: ShardedParameter, begin: int, values: Tensor, tp: Axis) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Divide ``values``, a flattened run of the slice from ``begin`` on, into blocks: offset in the whole weight, and a view."""
    placement = weight.placement
    used = 0
    dim = placement.dim
    pieces = list(placement.pieces(tp, weight.data_rank))
    for start, size in rectangles(placement.local(tp), begin, begin + values.numel()):
        block = values[used : used + prod(size)].view(size)
        used += block.numel()
        # gate and up of a fused weight are split separately, each into its own piece; a block may span both
        for piece in pieces:
            whole = [low + at for low, at in zip(start, piece.start, strict=True)]
            part = block
            if dim is not None and tp.size > 1:
                low = max(start[dim], piece.offset)
                high = min(start[dim] + size[dim], piece.offset + piece.size[dim])
                if low >= high:
                    continue
                whole[dim] = piece.start[dim] + low - piece.offset
                part = block.narrow(dim, low - start[dim], high - low)
            yield tuple(whole), part


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide the values ``begin`` to ``end`` of a flattened tensor of ``shape`` into blocks (start, size). In order: the rest of a row,
    whole rows, and the beginning of a row."""
    if len(shape) <= 1:
        if begin < end:
            yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row = prod(shape[1:])
    while begin < end:
        first = begin // row
        rows = (end - begin) // row
        if begin % row == 0 and rows:
            yield (first, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            begin += rows * row
            continue
        until = min(end, (first + 1) * row)
        for start, size in rectangles(shape[1:], begin - first * row, until - first * row):
            yield (first, *start), (1, *size)
        begin = until
