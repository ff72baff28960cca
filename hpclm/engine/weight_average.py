"""optim.ema: an exponential moving average of the trained weights, in fp32, divided among processes like the optimizer's state.

After each step that was not skipped, average = decay * average + (1 - decay) * weight. Checkpoints name it ``ema.WEIGHT``. Frozen
weights have no average.
"""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from hpclm.engine import SavedState, Shard
from hpclm.engine.save_plan import SavePlan
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.state import TrainingState

log = logging.getLogger(__name__)
CHUNK = 1 << 21  # values; the scratch memory of an update, 8 MB, stays in the cache


class WeightAverage:
    """The average of this process's values of each trained weight; it begins as a copy of the weights."""

    def __init__(self, state: TrainingState, plan: SavePlan, decay: float):
        """``plan``: the weights of this process, and how they are saved."""
        self.state = state
        self.plan = plan
        self.decay = decay
        self.averages = {weight.name: state.values(weight).clone() for weight in plan.weights if weight.trained}
        """By the name of the weight."""

    def _weights(self) -> Iterator[tuple[int, ShardedParameter, Tensor]]:
        """Each averaged weight: its number in the plan, the weight, and its average."""
        for number, weight in enumerate(self.plan.weights):
            if weight.name in self.averages:
                yield number, weight, self.averages[weight.name]

    @torch.no_grad()
    def update(self, skipped: Tensor | float) -> None:
        """Move the average towards the weights, unless the step was ``skipped``; the host does not wait for the device."""
        changed = torch.as_tensor(skipped) == 0
        kept = torch.where(changed, self.decay, 1.0)
        added = torch.where(changed, 1 - self.decay, 0.0)
        for _, weight, average in self._weights():
            values = self.state.values(weight)
            for part, new in zip(average.view(-1).split(CHUNK), values.view(-1).split(CHUNK), strict=True):
                # not lerp: with fused multiply-adds, bits would depend on how a weight is divided
                part.mul_(kept).add_(new * added)

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the average and the weights, one weight at a time."""
        for _, weight, average in self._weights():
            values = self.state.values(weight).clone()
            self.state.set(weight, average)
            average.copy_(values)

    def tensors(self) -> Iterator[Shard]:
        """The shards that this process saves."""
        for number, weight, average in self._weights():
            yield from self.plan.shards(number, f"ema.{weight.name}", average)

    def load(self, saved: SavedState, steps: int) -> None:
        """Load the saved average. Without one, begin with the loaded weights, of a run that has made ``steps`` updates."""
        shapes = saved.shapes()
        missing = False
        for number, weight, average in self._weights():
            name = f"ema.{weight.name}"
            if shapes.get(name) == weight.shape:
                self.plan.load(number, name, saved, average)
            else:
                average.copy_(self.state.values(weight))
                missing = True
        if missing and steps:
            log.warning(
                "optim.ema: the checkpoint has no average of the weights; it begins with the weights of this step"
            )
