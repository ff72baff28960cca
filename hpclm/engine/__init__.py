"""What trains: one optimizer step over one global batch, behind one small interface."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hpclm.cluster.team import Team
from hpclm.config import RunConfig
from hpclm.config.engine import ENGINES
from hpclm.data.batches import Batch
from hpclm.registry import lookup


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave."""

    loss: float  # mean over the step's tokens, before the update
    grad_norm: float  # global L2 norm before clipping
    loss_scale: float = 1.0
    skipped: bool = False  # the weights did not change: something was not finite


@dataclass(frozen=True)
class Shard:
    """The part of one logical tensor that this process holds."""

    tensor: Tensor
    shape: tuple[int, ...]  # of the whole
    start: tuple[int, ...]  # where the part begins in the whole

    @classmethod
    def whole(cls, tensor: Tensor) -> "Shard":
        """All of it."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)


class Engine(Protocol):
    """The seam between the loop and whatever computes."""

    def train_step(self, batches: Sequence[Batch], lr: float, step: int) -> StepResult:
        """One optimizer step over the micro-batches of step number ``step`` (it seeds dropout)."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token, without learning from it; holds one batch at a time."""
        ...

    def tensors(self) -> dict[str, Shard]:
        """Logical tensors of the training state by name: ``model.*`` and ``optim.*``."""
        ...

    def scalars(self) -> dict[str, Any]:
        """The rest of the training state, as JSON."""
        ...

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Take over a saved state; ConfigError when it is of another shape."""
        ...


def build(config: RunConfig, team: Team, device: torch.device, dtype: torch.dtype) -> Engine:
    """The engine that the settings name, with a freshly initialised model."""
    return lookup("engine", config.engine.name, ENGINES)(config, team, device, dtype)
