"""The pipeline x data x context x tensor mesh of processes, and the device and type of each rank's computation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpclm.base.errors import ConfigError
from hpclm.config import ParallelConfig


@dataclass(frozen=True)
class GroupOptions:
    """How to create process groups."""

    limit: timedelta | None = None
    """A collective that takes longer raises an error."""
    backend: str | None = None
    """None: the backend of the group of all ranks."""
    device: torch.device | None = None
    """The device on which ranks are connected as soon as a group exists; None: in the group's first collective."""

    def new_group(self, ranks: Sequence[int]) -> Any:
        """A process group of ``ranks``; only they call this."""
        # without local synchronization, every process would have to create every group of the mesh, even those it
        # does not belong to
        return self.connected(dist.new_group(list(ranks), self.limit, self.backend, use_local_synchronization=True))

    def connected(self, group: Any) -> Any:
        """``group``, after its ranks have connected; all of them call this."""
        if self.device is not None:
            # NCCL connects ranks in a group's first collective: in the first step, that would happen on autograd's thread too
            value = torch.zeros(1, device=self.device)
            dist.all_reduce(value, group=group)
            value.item()  # waits, so that a failing connection fails here
        return group


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, seen from this process."""

    size: int = 1
    rank: int = 0
    group: Any = None
    """Process group; None for a single process, which needs no communication."""
    ranks: tuple[int, ...] = (0,)
    """Global ranks of its processes, in order."""
    name: str = ""
    """The group's name; compiled code finds it by this."""
    options: GroupOptions = GroupOptions()
    """Options of its group, and of groups of some of its ranks."""

    @property
    def first(self) -> bool:
        """Whether this process is the first of the axis."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this process is the last of the axis."""
        return self.rank == self.size - 1


SINGLE = Axis()


@dataclass(frozen=True)
class Mesh:
    """Tensor is the fastest-varying axis, so that its ranks share a node; pipeline is the slowest (as in Megatron-LM)."""

    pp: Axis = SINGLE
    dp: Axis = SINGLE
    """All ranks with the same weights: the replicas, and within each its context-parallel ranks."""
    cp: Axis = SINGLE
    """Consecutive ranks of dp that share one replica's sequences (parallel.context)."""
    ep: Axis = SINGLE
    """Consecutive ranks of dp that divide the experts (parallel.expert)."""
    shard: Axis = SINGLE
    """The ranks of dp over which this rank's weights or optimizer state are sharded (parallel.shard): all of dp, or consecutive ones."""
    replicate: Axis = SINGLE
    """The ranks of dp with the same shards as this one."""
    tp: Axis = SINGLE
    holders: Axis = SINGLE
    """The shard x tp processes that together hold one copy of the shards of a stage's weights."""
    model: Axis = SINGLE
    """The pp x tp processes that together hold one copy of the model."""
    world: Axis = SINGLE
    """All processes."""
    nodes: int = 1
    """Number of nodes that this process's data axis spans."""

    @property
    def replicas(self) -> int:
        """Number of replicas: processes, or groups of them, that read different samples."""
        return self.dp.size // self.cp.size

    @property
    def replica(self) -> int:
        """Index of this process's replica."""
        return self.dp.rank // self.cp.size

    @classmethod
    def build(cls, rank: int, size: int, parallel: ParallelConfig, options: GroupOptions | None = None) -> "Mesh":
        """The mesh of ``size`` processes seen from ``rank``; every process must call this with the same settings.

        ``size`` is a multiple of tensor x pipeline x context.
        """
        tensor = parallel.tensor
        pipeline = parallel.pipeline
        data = size // parallel.model
        shard = parallel.shard_size(data)

        def at(stage: int, replica: int, slot: int) -> int:
            return (stage * data + replica) * tensor + slot

        stages = range(pipeline)
        replicas = range(data)
        slots = range(tensor)
        sharing = [replicas[first : first + shard] for first in replicas[::shard]]
        experts = [replicas[first : first + parallel.expert] for first in replicas[:: parallel.expert]]
        contexts = [replicas[first : first + parallel.context] for first in replicas[:: parallel.context]]

        # the members of a group wait for each other when they create it, so every process creates its groups in the
        # order of the axes below; another order on one rank would hang the start
        groups: dict[tuple[int, ...], Any] = {}

        def axis(members: Sequence[Sequence[int]]) -> Axis:
            return _axis(rank, size, members, groups, options or GroupOptions())

        return cls(
            pp=axis([[at(p, d, t) for p in stages] for d in replicas for t in slots]),
            dp=axis([[at(p, d, t) for d in replicas] for p in stages for t in slots]),
            cp=axis([[at(p, d, t) for d in group] for p in stages for group in contexts for t in slots]),
            ep=axis([[at(p, d, t) for d in group] for p in stages for group in experts for t in slots]),
            shard=axis([[at(p, d, t) for d in group] for p in stages for group in sharing for t in slots]),
            replicate=axis(
                [[at(p, d, t) for d in group] for p in stages for group in zip(*sharing, strict=True) for t in slots]
            ),
            tp=axis([[at(p, d, t) for t in slots] for p in stages for d in replicas]),
            holders=axis([[at(p, d, t) for d in group for t in slots] for p in stages for group in sharing]),
            model=axis([[at(p, d, t) for p in stages for t in slots] for d in replicas]),
            world=axis([range(size)]),
        )

    def of_weights(self, data_ranks: int) -> "Mesh":
        """The mesh for weights split over ``data_ranks`` consecutive ranks of dp (Placement): dp, shard and replicate have only the
        ranks with the same part. A collective over dp; returns this mesh if ``data_ranks`` is 1.

        If ``data_ranks`` divides parallel.shard, the ranks of a shard group with the same part shard it; otherwise nothing is sharded.
        """
        if data_ranks == 1:
            return self
        if self.dp.size % data_ranks:
            raise ConfigError(
                f"model.block splits weights over {data_ranks} data-parallel ranks, but there are {self.dp.size}; choose another "
                f"model.block, or run on a multiple of {data_ranks} x {self.model.size} x {self.cp.size} processes"
            )
        # the ranks of one part are data_ranks apart, as Placement.pieces counts them
        same = range(self.dp.rank % data_ranks, self.dp.size, data_ranks)
        dp = sub_axis(self.dp, same)
        size = 1
        if self.shard.size % data_ranks == 0:  # otherwise some shard groups would lack one of the parts
            size = self.shard.size // data_ranks
        first = dp.rank // size * size
        shard = sub_axis(dp, range(first, first + size))
        replicate = sub_axis(dp, range(dp.rank % size, dp.size, size))
        return replace(self, dp=dp, shard=shard, replicate=replicate, holders=_product(shard, self.tp))


SINGLE_MESH = Mesh()
"""A single process."""


def _axis(
    rank: int, size: int, members: Sequence[Sequence[int]], groups: dict[tuple[int, ...], Any], options: GroupOptions
) -> Axis:
    """The axis with the groups ``members``, seen from ``rank``; equal sets of ranks share one process group.

    Only the members of a group create it, so a process creates few groups even in a large mesh.
    """
    mine = next((tuple(ranks) for ranks in members if rank in ranks), (rank,))
    if len(mine) > 1 and mine not in groups:
        # a second group of all ranks would open all connections again
        groups[mine] = options.connected(dist.group.WORLD) if len(mine) == size else options.new_group(mine)
    return Axis(len(mine), mine.index(rank), groups.get(mine), mine, _name(groups.get(mine)), options)


def sub_axis(axis: Axis, members: Sequence[int]) -> Axis:
    """The processes of ``axis`` at ``members``, including this one, as a separate axis; only they call this."""
    if list(members) == list(range(axis.size)):
        return axis
    ranks = tuple(axis.ranks[member] for member in members)
    group = axis.options.new_group(ranks) if len(ranks) > 1 else None
    return Axis(len(ranks), list(members).index(axis.rank), group, ranks, _name(group), axis.options)


def _product(shard: Axis, tp: Axis) -> Axis:
    """The processes in the tensor-parallel groups of the ranks of ``shard``."""
    if shard.size == 1:
        return tp
    if tp.size == 1:
        return shard
    ranks = tuple(rank - tp.rank + slot for rank in shard.ranks for slot in range(tp.size))  # tp varies fastest
    group = shard.options.new_group(ranks)
    return Axis(len(ranks), shard.rank * tp.size + tp.rank, group, ranks, _name(group), shard.options)


def _name(group: Any) -> str:
    return getattr(group, "group_name", "")


@dataclass(frozen=True)
class Compute:
    """The device, type and mesh of this rank."""

    device: torch.device
    dtype: torch.dtype
    """Type of activations and matrix products."""
    mesh: Mesh = SINGLE_MESH

    @property
    def alone(self) -> "Compute":
        """A copy without data and context parallelism: one replica, still with its stages and tensor-parallel slices."""
        mesh = self.mesh
        alone = replace(
            mesh,
            dp=SINGLE,
            cp=SINGLE,
            ep=SINGLE,
            shard=SINGLE,
            replicate=SINGLE,
            holders=mesh.tp,
            world=mesh.model,
            nodes=1,
        )
        return replace(self, mesh=alone)
