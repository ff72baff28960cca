"""The pipeline x data x tensor grid of processes, as a value that is passed and never looked up."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpclm.config import ParallelConfig


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, seen from this process."""

    size: int = 1
    rank: int = 0
    group: Any = None
    """Process group; None for one process, which never speaks."""
    ranks: tuple[int, ...] = (0,)
    """Global ranks of its processes, in order."""

    @property
    def first(self) -> bool:
        """Whether this process is the axis's first."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this process is the axis's last."""
        return self.rank == self.size - 1


ALONE = Axis()


@dataclass(frozen=True)
class Mesh:
    """Tensor is the fastest-varying axis, so that its processes share a node; pipeline the slowest (as in Megatron-LM)."""

    pp: Axis = ALONE
    dp: Axis = ALONE
    tp: Axis = ALONE
    model: Axis = ALONE
    """The pp x tp processes that hold one copy of the model."""
    world: Axis = ALONE
    """All of them."""

    @classmethod
    def build(cls, rank: int, size: int, parallel: ParallelConfig, limit: timedelta | None = None) -> "Mesh":
        """The mesh of ``size`` processes seen from ``rank``; all of them call this, with the same settings.

        ``size`` is a multiple of tensor x pipeline. A collective that takes longer than ``limit`` raises.
        """
        tensor, pipeline = parallel.tensor, parallel.pipeline
        data = size // parallel.model

        def at(stage: int, replica: int, slot: int) -> int:
            return (stage * data + replica) * tensor + slot

        stages, replicas, slots = range(pipeline), range(data), range(tensor)

        groups: dict[tuple[int, ...], Any] = {}

        def axis(lines: Sequence[Sequence[int]]) -> Axis:
            return _axis(rank, size, lines, groups, limit)

        return cls(
            pp=axis([[at(p, d, t) for p in stages] for d in replicas for t in slots]),
            dp=axis([[at(p, d, t) for d in replicas] for p in stages for t in slots]),
            tp=axis([[at(p, d, t) for t in slots] for p in stages for d in replicas]),
            model=axis([[at(p, d, t) for p in stages for t in slots] for d in replicas]),
            world=axis([range(size)]),
        )


def _axis(
    rank: int, size: int, lines: Sequence[Sequence[int]], groups: dict[tuple[int, ...], Any], limit: timedelta | None
) -> Axis:
    """The axis that consists of ``lines`` of ranks, seen from ``rank``; the same ranks share a group.

    Only a line's own processes make its group, so a large mesh costs no process more than its few.
    """
    mine = next((tuple(line) for line in lines if rank in line), (rank,))
    if len(mine) > 1 and mine not in groups:
        whole = len(mine) == size
        groups[mine] = dist.group.WORLD if whole else dist.new_group(list(mine), limit, use_local_synchronization=True)
    return Axis(len(mine), mine.index(rank), groups.get(mine), mine)


def among(axis: Axis, members: Sequence[int], limit: timedelta | None = None) -> Axis:
    """The processes of ``axis`` at ``members``, of which this is one, as an axis of their own; only they call this."""
    if list(members) == list(range(axis.size)):
        return axis
    ranks = tuple(axis.ranks[member] for member in members)
    group = dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True) if len(ranks) > 1 else None
    return Axis(len(ranks), list(members).index(axis.rank), group, ranks)
