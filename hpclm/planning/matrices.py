"""What an optimizer costs a GPU of a stage if it updates whole matrices.

The optimizer's row in OPTIMIZERS gives the cost per matrix. hpclm.engine.matrix_exchange divides the matrices: in a round, each of the
data x tensor processes of a stage works on one matrix. A x B is a matrix, with A the smaller of its sides.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from hpclm.config import ModelConfig, OptimConfig
from hpclm.model import weights
from hpclm.model.weights import Weight
from hpclm.planning import optimizer
from hpclm.planning.layout import Layout, Stage, ends

Matrix = tuple[str, Weight]
"""The name of a weight, and the weight. A stack of experts' weights stands for the weight of one expert."""
UPDATING = 14
"""Bytes per value of a weight for its gradient, momentum and update, in fp32, and for the update in the type that is sent."""


@dataclass(frozen=True)
class ExchangeCost:
    """Cost of one optimizer step, for the GPU with the most work in each round."""

    flops: float = 0.0
    sent: float = 0.0
    """Bytes sent to processes with other parts of the same matrices, and to processes with the same parts."""
    memory: float = 0.0
    """Bytes during the largest round."""


def matrices(model: ModelConfig, stage: Stage) -> list[Matrix]:
    """The two-dimensional weights of a stage outside the experts."""
    return [
        *_of_blocks(model, stage, False),
        *((name, weight) for name, weight in ends(model, stage) if weight.is_matrix),
    ]


def of_experts(model: ModelConfig, layout: Layout, stage: Stage) -> list[Matrix]:
    """The two-dimensional weights of each expert of a stage on one process."""
    return [pair for pair in _of_blocks(model, stage, True) for _ in range(pair[1].stack // layout.expert)]


def _of_blocks(model: ModelConfig, stage: Stage, stacked: bool) -> Iterator[Matrix]:
    for layer in stage.blocks:
        for name, weight in weights.of_block(model, layer).items():
            if weight.is_matrix and bool(weight.stack) == stacked:
                yield f"block0.{name}", weight


def values(weight: Weight) -> int:
    """The number of values in a matrix."""
    return prod(weight.shape[-2:])


def exchange(model: ModelConfig, layout: Layout, optim: OptimConfig, zero: int, stage: Stage) -> ExchangeCost:
    """The cost for a GPU of a stage, at a ZeRO stage."""
    if not optimizer.kind(optim).matrices or not stage.with_experts:
        return _exchange(matrices(model, stage), layout, optim, zero)
    every = matrices(model, stage), of_experts(model, layout, stage)
    if layout.expert == 1:
        return _exchange([*every[0], *every[1]], layout, optim, zero)
    # divided experts are held by fewer processes, and have separate rounds
    rest = _exchange(every[0], layout, optim, zero)
    own = _exchange(every[1], layout.of_experts, optim, zero)
    return ExchangeCost(
        rest.flops + own.flops,
        rest.sent + own.sent,
        max(rest.memory, own.memory),
    )


def _exchange(every: list[Matrix], layout: Layout, optim: OptimConfig, zero: int) -> ExchangeCost:
    """The cost of the weights ``every`` for a GPU. ``layout``: the layout of these weights."""
    kind = optimizer.kind(optim)
    every = [(name, weight) for name, weight in every if kind.matrices and kind.matrices(weight.placement)]
    if not every:
        return ExchangeCost()
    holders = layout.tensor * (layout.sharing if zero else 1)
    """Processes that together hold one copy of the matrices."""
    size = layout.tensor * layout.ranks
    every.sort(key=lambda matrix: -values(matrix[1]) * min(matrix[1].shape[-2:]))
    rounds = [every[first : first + size] for first in range(0, len(every), size)]
    costs = {name: kind.cost(optim, weight.matrices) for name, weight in dict(every).items()}
    of_each = sum(values(weight) for _, weight in every) / holders
    copies = size // holders
    gathered = 2 * sum(max(values(weight) for _, weight in some) for some in rounds) * (holders - 1) / holders
    name, weight = max(every, key=lambda matrix: values(matrix[1]))
    largest = values(weight)
    element = costs[name].element
    # the gathered pieces, the matrix, and intermediate results
    working = element * (1 + (holders > 1)) * largest + costs[name].scratch
    moved = max(sum(values(weight) for _, weight in some) for some in rounds) / holders
    return ExchangeCost(
        flops=sum(max(costs[name].flops for name, _ in some) for some in rounds),
        sent=element * (gathered + of_each * (copies - 1) / copies),
        memory=element * moved + max(UPDATING * largest / holders, working),
    )
