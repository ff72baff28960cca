"""An engine's fp32 weights and optimizer state, as logical tensors that any layout can read: a weight at a time.

A checkpoint has a weight as ``model.NAME``, and each tensor that the optimizer keeps of it as ``optim.TENSOR.NAME``, by the name
that the optimizer gives it (hpclm.optim.optimizers).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hpclm.engine import SavedState, Shard
from hpclm.engine.save_plan import SavePlan
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.optim.adamw import set_state, steps_taken
from hpclm.optim.optimizers import OptimizerKind


class TrainingState:
    """The state of an optimizer that updates ``ShardedParameter.parameter`` itself; for wrapped ones, override what differs."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: OptimizerKind):
        self.optimizer, self.kind = optimizer, kind

    def held(self, weight: ShardedParameter) -> ShardedParameter:
        """``weight``, with the run of its values that this process keeps."""
        return weight

    def names(self, weight: ShardedParameter) -> list[str]:
        """The tensors that the optimizer keeps of a weight now; none before its first update."""
        its, shape = self.optimizer.state.get(weight.parameter, {}), weight.parameter.shape
        return [n for n, value in its.items() if n != "step" and isinstance(value, Tensor) and value.shape == shape]

    def values(self, weight: ShardedParameter, name: str | None = None) -> Tensor:
        """This process's values of a weight, or of the optimizer's tensor ``name`` of it."""
        return self.optimizer.state[weight.parameter][name] if name else weight.parameter.detach()

    def steps(self) -> int:
        """Updates so far."""
        return steps_taken(self.optimizer)

    def tensors(self, plan: SavePlan) -> Iterator[Shard]:
        """The shards that this process saves."""
        for number, weight in enumerate(plan.weights):
            yield from plan.shards(number, f"model.{weight.name}", self.values(weight))
            for name in self.names(weight):
                yield from plan.shards(number, f"optim.{name}.{weight.name}", self.values(weight, name))

    def load(self, plan: SavePlan, saved: SavedState, steps: int) -> None:
        """Load the weights, and the optimizer's state if there were ``steps`` updates."""
        for number, weight in enumerate(plan.weights):
            plan.load(number, f"model.{weight.name}", saved, weight.parameter)
            names = self.kind.state(weight.name, weight.shape) if steps else ()
            tensors = {name: torch.empty_like(weight.parameter) for name in names}
            for name, values in tensors.items():
                plan.load(number, f"optim.{name}.{weight.name}", saved, values)
            set_state(self.optimizer, weight.parameter, tensors, steps)
