"""What Muon's orthogonal updates cost a GPU of a stage, shared out as hpclm.engine.matrix_exchange does: in a round, each of the data x
tensor processes of a stage works on one matrix.

A x B is a matrix, with A the smaller of its sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hpclm.config import ModelConfig
from hpclm.planning.layout import Layout, Stage

Shape = tuple[int, int]
UPDATING = 14
"""Bytes per value of a weight for its gradient, momentum and update before it is orthogonalised, in fp32, and the update as sent."""


@dataclass(frozen=True)
class NewtonSchulz:
    """Settings of optim that decide what an update costs."""

    steps: int
    element: int
    """Bytes of a value, computed with and sent."""
    split: bool

    def flops(self, shape: Shape) -> float:
        """Of one matrix: X X^T, its square, and their sum times X (Jordan et al. 2024)."""
        a, b = min(shape), max(shape)
        return self.steps * (4 * a * a * b + 2 * a**3)


@dataclass(frozen=True)
class Exchange:
    """Of one optimizer step, for the GPU that has most to do in each round."""

    flops: float
    sent: float
    """Bytes to the processes that hold other parts of the same matrices, and to those that hold the same parts."""
    memory: float
    """Bytes, during the largest round."""


def weights(model: ModelConfig, split: bool) -> list[list[Shape]]:
    """The matrices that each weight of a block is orthogonalised as."""
    hidden, inner = model.hidden, model.ffn_width
    keys = model.groups * model.head_width
    fused = [
        [(model.attention_width, hidden), (keys, hidden), (keys, hidden)],
        [(hidden, model.attention_width)],
        [(inner, hidden)] * (1 + model.gated),
        [(hidden, inner)],
    ]
    return fused if split else [[whole(parts)] for parts in fused]


def whole(parts: Sequence[Shape]) -> Shape:
    """The shape of the weight that fuses matrices."""
    return sum(rows for rows, _ in parts), parts[0][1]


def exchange(model: ModelConfig, layout: Layout, given: NewtonSchulz, zero: int, stage: Stage) -> Exchange:
    """The cost for a GPU of a stage, at a ZeRO stage."""
    holders = layout.tensor * (layout.sharing if zero else 1)
    """Processes that together hold one copy of the matrices."""
    size = layout.tensor * layout.ranks
    every = sorted(weights(model, given.split) * stage.blocks, key=lambda w: -prod(whole(w)) * min(whole(w)))
    rounds = [every[first : first + size] for first in range(0, len(every), size)]
    values, copies = sum(prod(whole(weight)) for weight in every) / holders, size // holders
    gathered = 2 * sum(max(prod(whole(weight)) for weight in some) for some in rounds) * (holders - 1) / holders
    largest = max(every, key=lambda weight: prod(whole(weight)))
    own, square = prod(whole(largest)), max(min(part) for part in largest) ** 2
    # the gathered pieces, the matrix, what is made of it and of its parts
    working = given.element * ((3 + (holders > 1)) * own + 2 * square)
    held = max(sum(prod(whole(weight)) for weight in some) for some in rounds) / holders
    return Exchange(
        flops=sum(max(sum(map(given.flops, weight)) for weight in some) for some in rounds),
        sent=given.element * (gathered + values * (copies - 1) / copies),
        memory=given.element * held + max(UPDATING * own / holders, working),
    )
