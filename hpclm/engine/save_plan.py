"""Who saves what: processes that hold the same values each save an equal part. When loading, each reads a part and broadcasts it.

Nothing is gathered for a save: every process writes values that it holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpclm.engine import SavedState, Shard
from hpclm.engine.sharded_parameter import ShardedParameter, blocks
from hpclm.parallel.collectives import broadcast
from hpclm.parallel.mesh import SINGLE, Axis, Mesh

Span = tuple[int, int]
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class SavePlan:
    """The values of weights and optimizer tensors that this process saves and reads; the same at every save."""

    weights: Sequence[ShardedParameter]
    tp: Axis
    saved: Sequence[Span]
    """For each weight: the span that this process saves, counted from its first value here."""
    read: Sequence[Sequence[Span]]
    """For each weight: the span that each rank of ``replicas`` reads."""

    @classmethod
    def among(
        cls, weights: Sequence[ShardedParameter], mesh: Mesh, least_mb: float = 0.0, bytes_each: int = 12
    ) -> "SavePlan":
        """The plan for ``weights``. Tensor-parallel ranks divide the saving of values that all of them hold. The number of saving
        processes is limited so that each has at least ``least_mb`` MB. ``bytes_each``: bytes of one value of a weight, including the
        optimizer's state."""
        # MB over bytes gives millions of values
        least_millions = least_mb / bytes_each
        tp = mesh.tp
        saved: list[Span] = [(0, 0)] * len(weights)
        read: list[Sequence[Span]] = [()] * len(weights)
        # weights held by the same processes are divided as one long vector, so that each process saves about the same
        # amount in few blocks
        pools: dict[Any, list[int]] = {}
        for number, weight in enumerate(weights):
            everywhere = tp.size > 1 and weight.placement.dim is None
            # axes of one process differ in its rank: tensor-parallel ranks would have different pools
            replicas = weight.replicas if weight.replicas.size > 1 else SINGLE
            pools.setdefault((replicas, everywhere, weight.duplicate), []).append(number)
        for (replicas, everywhere, duplicate), members in pools.items():
            slots, slot = (tp.size, tp.rank) if everywhere else (1, 0)
            alike = [weights[number] for number in members]
            writers = among_ranks(alike, replicas.size * slots, tp, least_millions)
            readers = among_ranks(alike, replicas.size, tp, least_millions)
            for number, saved_spans, read_spans in zip(members, writers, readers, strict=True):
                # only the first of two stages saves a tied embedding; both read it
                if not duplicate:
                    saved[number] = saved_spans[replicas.rank * slots + slot]
                read[number] = read_spans
        return cls(weights, tp, saved, read)

    def shards(self, number: int, name: str, values: Tensor) -> Iterator[Shard]:
        """This process's shards of the tensor ``name``, divided like weight ``number``. ``values``: its values here."""
        shape = self.weights[number].placement.shape
        values = values.detach().contiguous()
        for start, size, stride, offset in self._blocks[number]:
            yield Shard(name, values.as_strided(size, stride, values.storage_offset() + offset), shape, start)

    @cached_property
    def _blocks(self) -> list[list[tuple[Sizes, Sizes, Sizes, int]]]:
        """For each weight, the blocks that this process saves: offset in the weight, size, strides, and offset in the local values."""
        blocks_of = []
        for weight, (low, high) in zip(self.weights, self.saved, strict=True):
            # on the meta device: only shapes and strides are needed
            values = torch.empty(weight.count, device="meta")[low:high]
            parts = blocks(weight, weight.begin + low, values, self.tp)
            blocks_of.append([(at, tuple(part.shape), part.stride(), int(part.storage_offset())) for at, part in parts])
        return blocks_of

    def load(self, number: int, name: str, saved: SavedState, target: Tensor) -> None:
        """Load this process's values of the tensor ``name`` into ``target``, divided like weight ``number``. A collective over the
        processes that hold the same values."""
        weight = self.weights[number]
        values = target.view(-1)
        values[weight.count :] = 0  # padding
        for rank, (low, high) in enumerate(self.read[number]):
            if low == high:
                continue
            part = values[low:high]
            # one process reads and broadcasts: otherwise N replicas would read the same bytes N times from a shared
            # disk
            if rank == weight.replicas.rank:
                for start, block in blocks(weight, weight.begin + low, part, self.tp):
                    block.copy_(saved.block(name, start, tuple(block.shape)))
            broadcast(part, weight.replicas, rank)


def among_ranks(weights: Sequence[ShardedParameter], size: int, tp: Axis, least_millions: float) -> list[list[Span]]:
    """For each weight, the span of each of ``size`` ranks. If an even part has less than ``least_millions`` million values, fewer ranks
    get one, spread evenly over all ranks and so over nodes."""
    millions = sum(weight.count for weight in weights) / 1e6
    parts = max(1, int(min(size, millions / least_millions))) if least_millions else size
    chosen = {part * size // parts: part for part in range(parts)}
    return [
        [spans[chosen[rank]] if rank in chosen else (0, 0) for rank in range(size)]
        for spans in divided(weights, parts, tp)
    ]


def divided(weights: Sequence[ShardedParameter], parts: int, tp: Axis) -> list[list[Span]]:
    """For each weight, its values in each of ``parts`` equal parts of all weights laid end to end. Cuts fall between rows, since a part
    of a row would be a separate block."""
    total = sum(weight.count for weight in weights)
    offset = 0
    spans = []
    for weight in weights:
        row = prod(weight.placement.local(tp)[1:])
        cuts = [0, *(_cut(total * part // parts - offset, weight, row) for part in range(1, parts)), weight.count]
        spans.append(list(pairwise(cuts)))
        offset += weight.count
    return spans


def _cut(index: int, weight: ShardedParameter, row: int) -> int:
    """The first value from ``index`` on that begins a row."""
    index = min(max(index, 0), weight.count)
    return min(index + -(weight.begin + index) % row, weight.count)
