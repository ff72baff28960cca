"""Checks that known numbers arrive unchanged: in collectives over every process group, and in the exchange of an optimizer's matrices."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hpclm.engine.matrix_exchange import MatrixExchange
from hpclm.engine.sharded_parameter import ShardedParameter, blocks
from hpclm.parallel.collectives import all_gather, all_reduce, finish, start_scatter
from hpclm.parallel.mesh import Axis, Compute

SENT = 1 << 18  # numbers in each message
WHOLE = 251  # bf16, the coarsest type, holds whole numbers up to 256 exactly
TYPES = (torch.bfloat16, torch.float32)
"""Types of matrices that optimizers exchange."""


def wrong_sums(compute: Compute) -> Iterator[str]:
    """The process groups that change known numbers."""
    mesh = compute.mesh
    axes = {name: getattr(mesh, name) for name in ("world", "pp", "dp", "ep", "shard", "replicate", "tp", "model")}
    numbers = (torch.arange(SENT) % 251 + 1).to(compute.device)

    def sent_by(rank: int) -> Tensor:
        """The numbers that a rank sends: whole, so fp32 holds their sums exactly."""
        return (numbers * (rank % 8 + 1)).float()

    done: set[tuple[int, ...]] = set()
    for name, axis in axes.items():
        if axis.size == 1 or axis.ranks in done:
            continue
        done.add(axis.ranks)
        total = (numbers * sum(rank % 8 + 1 for rank in range(axis.size))).float()
        gathered = all_gather(sent_by(axis.rank), axis).view(axis.size, SENT)
        spread = finish(*start_scatter(sent_by(axis.rank).repeat(axis.size), axis))
        right = {
            "sum": torch.equal(all_reduce(sent_by(axis.rank), axis), total),
            "gather": all(torch.equal(gathered[rank], sent_by(rank)) for rank in range(axis.size)),
            "scatter": torch.equal(spread, total),
        }
        wrong = [kind for kind, holds in right.items() if not holds]
        if wrong:
            yield f"{', '.join(wrong)} over the process group {name} (ranks {list(axis.ranks)}): known numbers arrive changed"


def lost_matrices(exchange: MatrixExchange) -> str:
    """The first matrix with values that do not reach the updating process, or do not return here; empty without one. A collective."""
    wrong = list[str]()

    def work(number: int, matrix: Tensor) -> Tensor:
        places = (torch.arange(size, device=matrix.device) for size in matrix.shape)
        if not torch.equal(matrix, _numbers(number, *places).to(matrix.dtype)):
            wrong.append(f"values of {exchange.weights[number].name} do not arrive where the optimizer works on it")
        return matrix + 1

    for kind in TYPES:
        for numbers in exchange.rounds:
            sent = [_part(number, exchange.weights[number], exchange.tp).to(kind) for number in numbers]
            due = [values + 1 for values in sent]
            for number, values, back in zip(numbers, due, exchange(numbers, sent, work), strict=True):
                if not torch.equal(back, values):
                    wrong.append(
                        f"values of {exchange.weights[number].name} do not come back as the optimizer has changed them"
                    )
    return next(iter(wrong), "")


def _numbers(number: int, rows: Tensor, columns: Tensor) -> Tensor:
    """[rows, columns] whole numbers for a matrix that encode their position."""
    return (7 * number + 31 * rows[:, None] + 3 * columns) % WHOLE


def _part(number: int, weight: ShardedParameter, tp: Axis) -> Tensor:
    """This process's values of a matrix of ``_numbers``, flattened."""
    values = torch.empty(weight.count, device=weight.parameter.device)
    for start, block in blocks(weight, weight.begin, values, tp):
        places = (torch.arange(low, low + n, device=values.device) for low, n in zip(start, block.shape, strict=True))
        block.copy_(_numbers(number, *places))
    return values
