"""Cost, for a GPU of a stage, of an optimizer that updates whole matrices or keeps state not divided like the weights.

The optimizer's row in OPTIMIZERS gives the cost per matrix. hpclm.engine.matrix_exchange divides the matrices: in a round, each of the
data x tensor processes of a stage works on one matrix. A x B is a matrix, with A the smaller of its sides.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from hpclm.config import ModelConfig, OptimConfig
from hpclm.config.optimizers import StateTensor, stacked, tensors_held
from hpclm.planning import optimizer
from hpclm.planning.layout import Layout, Stage

Shape = tuple[int, int]
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
    state: float = 0.0
    """Bytes of optimizer state not divided like its weight: the state of the matrices that a GPU works on, and replicated state."""


def weights(model: ModelConfig, stage: Stage) -> list[tuple[str, list[Shape]]]:
    """The two-dimensional weights of a stage: for each, its name and the matrices that it fuses."""
    hidden = model.hidden
    keys = model.attention.groups * model.head_width
    attention = [
        ("block0.attention.qkv.weight", [(model.attention_width, hidden), (keys, hidden), (keys, hidden)]),
        ("block0.attention.out.weight", [(hidden, model.attention_width)]),
    ]
    mlp = _mlp("block0.mlp", hidden, model.ffn_width, model.gated)
    routed = [("block0.mlp.router.weight", [(model.experts.count, hidden)])]
    if model.experts.shared_ffn:
        routed += _mlp("block0.mlp.shared", hidden, model.experts.shared_ffn, model.gated)
    table = [(model.padded_vocab, hidden)]
    tables = []
    if stage.first or (stage.last and model.tied):
        tables.append(("tokens.weight", table))
    if stage.last and not model.tied:
        tables.append(("output.weight", table))
    blocks = [*attention * stage.blocks, *mlp * stage.count(False), *routed * stage.count(True)]
    return [*blocks, *tables]


def _mlp(name: str, hidden: int, inner: int, gated: bool) -> list[tuple[str, list[Shape]]]:
    up = [(inner, hidden)] * (2 if gated else 1)
    return [(f"{name}.up.weight", up), (f"{name}.down.weight", [(hidden, inner)])]


def experts(model: ModelConfig, layout: Layout, stage: Stage) -> list[tuple[str, list[Shape]]]:
    """The two-dimensional weights of each expert of a stage on one process."""
    hidden = model.hidden
    inner = model.expert_width
    one = [
        ("block0.mlp.experts.up", [(inner, hidden)] * (1 + model.gated)),
        ("block0.mlp.experts.down", [(hidden, inner)]),
    ]
    return one * (stage.with_experts * model.experts.count // layout.expert)


def whole(parts: Sequence[Shape]) -> Shape:
    """The shape of the weight that fuses matrices."""
    return sum(rows for rows, _ in parts), parts[0][1]


def shape(name: str, parts: Sequence[Shape]) -> tuple[int, ...]:
    """The shape of the weight that fuses matrices; for experts, the shape of a stack of one."""
    return (1, *whole(parts)) if stacked(name) else whole(parts)


def exchange(model: ModelConfig, layout: Layout, optim: OptimConfig, zero: int, stage: Stage) -> ExchangeCost:
    """The cost for a GPU of a stage, at a ZeRO stage."""
    if not optimizer.kind(optim).matrices or not stage.with_experts:
        return _exchange(weights(model, stage), layout, optim, zero)
    every = weights(model, stage), experts(model, layout, stage)
    if layout.expert == 1:
        return _exchange([*every[0], *every[1]], layout, optim, zero)
    # divided experts are held by fewer processes, and have separate rounds
    rest = _exchange(every[0], layout, optim, zero)
    of_experts = _exchange(every[1], layout.of_experts, optim, zero)
    return ExchangeCost(
        rest.flops + of_experts.flops,
        rest.sent + of_experts.sent,
        max(rest.memory, of_experts.memory),
        rest.state + of_experts.state,
    )


def _exchange(every: list[tuple[str, list[Shape]]], layout: Layout, optim: OptimConfig, zero: int) -> ExchangeCost:
    """The cost of these weights for a GPU. ``layout``: for these weights."""
    kind = optimizer.kind(optim)
    state = {name: kind.state(name, shape(name, parts), optim) for name, parts in dict(every).items()}
    everywhere = sum(_bytes(tensors_held(state[name], "everywhere").values()) for name, _ in every)
    chooses = kind.matrices
    works_on = {name for name, parts in dict(every).items() if chooses and chooses(name, shape(name, parts))}
    every = [(name, parts) for name, parts in every if name in works_on]
    if not every:
        return ExchangeCost(state=everywhere)
    holders = layout.tensor * (layout.sharing if zero else 1)
    """Processes that together hold one copy of the matrices."""
    size = layout.tensor * layout.ranks
    every.sort(key=lambda weight: -prod(whole(weight[1])) * min(whole(weight[1])))
    rounds = [every[first : first + size] for first in range(0, len(every), size)]
    costs = {name: kind.cost(optim, parts) for name, parts in every}
    values = sum(prod(whole(parts)) for _, parts in every) / holders
    copies = size // holders
    gathered = 2 * sum(max(prod(whole(parts)) for _, parts in some) for some in rounds) * (holders - 1) / holders
    name, parts = max(every, key=lambda weight: prod(whole(weight[1])))
    largest = prod(whole(parts))
    element = costs[name].element
    # the gathered pieces, the matrix, and intermediate results
    working = element * (1 + (holders > 1)) * largest + costs[name].scratch
    moved = max(sum(prod(whole(parts)) for _, parts in some) for some in rounds) / holders
    kept = [
        sum(_bytes(tensors_held(state[some[slot][0]], "matrix").values()) for some in rounds if slot < len(some))
        for slot in range(size)
    ]
    return ExchangeCost(
        flops=sum(max(costs[name].flops for name, _ in some) for some in rounds),
        sent=element * (gathered + values * (copies - 1) / copies),
        memory=element * moved + max(UPDATING * largest / holders, working),
        state=everywhere + max(kept),
    )


def _bytes(tensors: Iterable[StateTensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)
