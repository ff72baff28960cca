"""Whole matrices for an optimizer: processes that hold parts or copies of the same matrices divide the work and exchange results.

In a round every process works on one matrix, so it never holds more than one. The processes that together hold one copy of the weights
gather the matrices and scatter the results by all-to-all. Processes with the same values receive them by broadcast.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch.distributed as dist
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.engine.sharded_parameter import ShardedParameter, blocks
from hpclm.optim.optimizers import Matrix
from hpclm.parallel.collectives import all_to_all
from hpclm.parallel.mesh import Axis, Mesh
from hpclm.parallel.placement import Placement


class MatrixExchange:
    """Implements hpclm.optim.optimizers.WholeMatrices."""

    def __init__(self, weights: Sequence[ShardedParameter], mesh: Mesh):
        """``weights``: equal on all processes that hold parts or copies of the same weights."""
        for weight in weights:
            if weight.placement.data_ranks > 1 and not weight.placement.stacked:
                raise ConfigError(
                    f"{weight.name} is a matrix that data-parallel ranks split, but this optimizer needs whole matrices: give it three "
                    "dimensions and split the first, or set optim.name=adamw"
                )
        self.tp = mesh.tp
        pairs = [pair for weight in weights for pair in _matrices(weight, mesh.tp)]
        self.matrices = [matrix for matrix, _ in pairs]
        self.weights = weights = [local_part for _, local_part in pairs]
        """This process's part of each matrix."""
        # Newton-Schulz takes about prod(shape) x min(shape) multiplications, and a round lasts as long as its slowest
        # matrix
        order = sorted(range(len(weights)), key=lambda n: -prod(weights[n].shape) * min(weights[n].shape))
        self.rounds: list[list[int]] = []
        """Matrices of about equal cost that the same processes divide among them: matrix n belongs to process n, counted copy by copy."""
        # divided experts are held by fewer processes than other matrices
        homes: dict[tuple[Axis, Axis], list[int]] = {}
        for number in order:
            homes.setdefault(self._axes([number]), []).append(number)
        for (holders, replicas), members in homes.items():
            size = holders.size * replicas.size
            self.rounds += [members[first : first + size] for first in range(0, len(members), size)]

    @property
    def worked_on(self) -> list[str]:
        """Names of the matrices that this process works on."""
        slots = ((numbers, *self._axes(numbers)) for numbers in self.rounds)
        places = ((numbers, replicas.rank * holders.size + holders.rank) for numbers, holders, replicas in slots)
        return [self.weights[numbers[slot]].name for numbers, slot in places if slot < len(numbers)]

    def _axes(self, numbers: Sequence[int]) -> tuple[Axis, Axis]:
        """The processes that together hold one copy of a round's matrices, and those that hold the same values."""
        weight = self.weights[numbers[0]]
        return weight.holders or self.tp, weight.replicas

    def __call__(
        self, numbers: Sequence[int], local_values: Sequence[Tensor], work: Callable[[int, Tensor], Tensor]
    ) -> Sequence[Tensor]:
        """This process's values of each matrix of a round -> its values of ``work(number, matrix)``, flattened."""
        holders, replicas = self._axes(numbers)
        size = holders.size
        rank = holders.rank
        weights = [self.weights[number] for number in numbers]
        first = replicas.rank * size
        matrix_of = dict(enumerate(range(first, min(first + size, len(numbers)))))
        """Maps a rank among the holders to the index of its matrix, within this copy's share of the round."""
        flat = [values.flatten() for values in local_values]
        sent = [flat[i] if self._gives(weights[i], rank, owner) else flat[i][:0] for owner, i in matrix_of.items()]
        matrix = weights[matrix_of[rank]] if rank in matrix_of else None
        results = list[Tensor]()
        counts = [0] * size
        for peer in range(size):
            if matrix and self._gives(matrix, peer, rank):
                counts[peer] = self._local_range(matrix, peer)[1]
        pieces = all_to_all(sent, counts, flat[0], holders)
        if matrix:
            whole = flat[0].new_empty(matrix.shape)
            for peer, piece in enumerate(pieces):
                for place, block in self._blocks(matrix, peer, piece):
                    whole[place] = block
            whole = work(numbers[matrix_of[rank]], whole)
            for peer in range(size):
                results.append(whole.new_empty(self._local_range(matrix, peer)[1]))
                for place, block in self._blocks(matrix, peer, results[-1]):
                    block.copy_(whole[place])
        scattered = all_to_all(results, [len(flat[i]) for i in matrix_of.values()], flat[0], holders)
        # all_to_all returns a vector for every process; the last ones are empty in a round that is not full
        for i, values in zip(matrix_of.values(), scattered, strict=False):
            flat[i] = values
        # each matrix comes from the copy of the weights that worked on it; start all broadcasts before waiting for
        # the first
        if replicas.size > 1:
            sources = [replicas.ranks[i // size] for i in range(len(flat))]
            pairs = zip(flat, sources, strict=True)
            for work_object in [dist.broadcast(values, s, replicas.group, async_op=True) for values, s in pairs]:
                work_object.wait()
        return flat

    def _gives(self, weight: ShardedParameter, peer: int, owner: int) -> bool:
        """Whether a process sends its values to the owner of a matrix; only one of several tensor-parallel copies does."""
        return weight.placement.dim is not None or peer % self.tp.size == owner % self.tp.size

    def _local_range(self, weight: ShardedParameter, peer: int) -> tuple[int, int]:
        """Index of the first value that a process holds of its tensor-parallel slice, and the number of its values."""
        if weight.local_range:
            return weight.local_range(peer // self.tp.size)
        return 0, prod(weight.placement.local(self.tp))

    def _blocks(
        self, weight: ShardedParameter, peer: int, values: Tensor
    ) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """The values of a process as blocks of the matrix."""
        tp = Axis(self.tp.size, peer % self.tp.size)
        for start, block in blocks(weight, self._local_range(weight, peer)[0], values, tp):
            yield tuple(slice(low, low + n) for low, n in zip(start, block.shape, strict=True)), block


def _matrices(weight: ShardedParameter, tp: Axis) -> Iterator[tuple[Matrix, ShardedParameter]]:
    """The matrices of a weight with this process's part of each: the weight itself, or the experts in its part of a stack."""
    if not weight.placement.stacked:
        yield Matrix(weight, weight.shape, weight.placement.fused), weight
        return
    placement = weight.placement
    count, *local = placement.local(tp)
    first = weight.data_rank % placement.data_ranks * count
    of_expert = Placement(placement.shape[1:], placement.dim and placement.dim - 1, placement.fused)
    for expert in range(count):
        start = expert * prod(local)
        begin, values = _overlap((weight.begin, weight.count), start, prod(local))
        at = start + begin - weight.begin if values else 0
        ranges = weight.local_range and partial(_range_of_expert, weight.local_range, start, prod(local))
        local_part = replace(
            weight,
            name=f"{weight.name}.{first + expert}",
            placement=of_expert,
            begin=begin,
            values=values,
            local_range=ranges,
        )
        yield Matrix(weight, of_expert.shape, of_expert.fused, slice(at, at + values)), local_part


def _range_of_expert(
    local_range: Callable[[int], tuple[int, int]], start: int, size: int, rank: int
) -> tuple[int, int]:
    return _overlap(local_range(rank), start, size)


def _overlap(run: tuple[int, int], start: int, size: int) -> tuple[int, int]:
    """The part of a run (begin, length) that lies within ``size`` values from ``start`` on, counted from ``start``."""
    low, high = (min(max(end - start, 0), size) for end in (run[0], run[0] + run[1]))
    return low, high - low
