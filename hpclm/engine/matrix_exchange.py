"""Whole matrices for an optimizer: processes that hold parts or copies of the same matrices share them out, and exchange the results.

In a round every process works on one matrix, so that it holds no more than one. All-to-alls among the processes that together hold
one copy of the weights gather the matrices and scatter the results; those that hold the same values get them by broadcasts.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch.distributed as dist
from torch import Tensor

from hpclm.engine.sharded_parameter import ShardedParameter, blocks
from hpclm.errors import ConfigError
from hpclm.parallel.collectives import all_to_all
from hpclm.parallel.mesh import Axis, Mesh


class MatrixExchange:
    """An Exchange (hpclm.optim.optimizers) of matrices that are all divided in the same way."""

    def __init__(self, weights: Sequence[ShardedParameter], mesh: Mesh):
        """``weights``: the same on all processes that hold parts or copies of them."""
        for weight in weights:
            if weight.placement.data_ranks > 1:
                raise ConfigError(
                    f"{weight.name} is a matrix that data-parallel ranks split, and this optimizer works on whole ones: give it three "
                    "dimensions, of which they split the first, or choose optim.name=adamw"
                )
        self.weights, self.tp = weights, mesh.tp
        self.holders = mesh.holders if any(weight.local_range for weight in weights) else mesh.tp
        """The processes that together hold one copy."""
        self.replicas = weights[0].replicas if weights else mesh.dp
        # Newton-Schulz multiplies about prod(shape) x min(shape) times, and a round lasts as long as its slowest matrix
        order = sorted(range(len(weights)), key=lambda n: -prod(weights[n].shape) * min(weights[n].shape))
        size = self.holders.size * self.replicas.size
        self.rounds = [order[first : first + size] for first in range(0, len(order), size)]
        """Matrices that take about the same time; the n-th belongs to the n-th process, counted copy by copy."""

    @property
    def worked_on(self) -> list[str]:
        """Names of the matrices that this process works on."""
        slot = self.replicas.rank * self.holders.size + self.holders.rank
        return [self.weights[numbers[slot]].name for numbers in self.rounds if slot < len(numbers)]

    def __call__(
        self, numbers: Sequence[int], local_values: Sequence[Tensor], work: Callable[[int, Tensor], Tensor]
    ) -> Sequence[Tensor]:
        """This process's values of each matrix of a round -> its values of ``work(number, matrix)``, flattened."""
        size, rank, weights = self.holders.size, self.holders.rank, [self.weights[number] for number in numbers]
        first = self.replicas.rank * size
        matrix_of = dict(enumerate(range(first, min(first + size, len(numbers)))))
        """Rank among the holders -> index of its matrix, of those that this copy of the weights works on."""
        flat = [values.flatten() for values in local_values]
        sent = [flat[i] if self._gives(weights[i], rank, owner) else flat[i][:0] for owner, i in matrix_of.items()]
        matrix, results = weights[matrix_of[rank]] if rank in matrix_of else None, list[Tensor]()
        counts = [
            (matrix and self._gives(matrix, peer, rank) and self._local_range(matrix, peer)[1]) or 0
            for peer in range(size)
        ]
        pieces = all_to_all(sent, counts, flat[0], self.holders)
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
        scattered = all_to_all(results, [len(flat[i]) for i in matrix_of.values()], flat[0], self.holders)
        # all_to_all returns a vector for every process, the last ones empty in a round that is not full
        for i, values in zip(matrix_of.values(), scattered, strict=False):
            flat[i] = values
        # each matrix comes from the copy of the weights that worked on it; all broadcasts are under way before one is
        # waited for
        every = enumerate(flat) if self.replicas.size > 1 else ()
        group, ranks = self.replicas.group, self.replicas.ranks
        for broadcast in [dist.broadcast(values, ranks[i // size], group, async_op=True) for i, values in every]:
            broadcast.wait()
        return flat

    def _gives(self, weight: ShardedParameter, peer: int, owner: int) -> bool:
        """Whether a process sends its values to the owner of a matrix; of tensor-parallel copies only one does."""
        return weight.placement.dim is not None or peer % self.tp.size == owner % self.tp.size

    def _local_range(self, weight: ShardedParameter, peer: int) -> tuple[int, int]:
        """The index of the first value of the tensor-parallel slice that a process holds, and how many it holds."""
        return (
            weight.local_range(peer // self.tp.size)
            if weight.local_range
            else (0, prod(weight.placement.local(self.tp)))
        )

    def _blocks(
        self, weight: ShardedParameter, peer: int, values: Tensor
    ) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Where in the matrix the values of a process lie, in blocks."""
        tp = Axis(self.tp.size, peer % self.tp.size)
        for start, block in blocks(weight, self._local_range(weight, peer)[0], values, tp):
            yield tuple(slice(low, low + n) for low, n in zip(start, block.shape, strict=True)), block
