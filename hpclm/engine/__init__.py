"""What trains: one optimizer step over one global batch, behind one small interface."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hpclm.config import RunConfig
from hpclm.config.engine import ENGINES
from hpclm.data.batches import Batch
from hpclm.parallel.mesh import Mesh
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
    """A block of one logical tensor that this process holds, and saves."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]  # of the whole
    start: tuple[int, ...]  # where the block begins in the whole

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> "Shard":
        """All of it."""
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


class Saved(Protocol):
    """The logical tensors of a saved state."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every whole tensor by name."""
        ...

    def block(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """A block of one of them."""
        ...


class Engine(Protocol):
    """The seam between the loop and whatever computes."""

    def train_step(self, batches: Sequence[Batch], lr: float, step: int) -> StepResult:
        """One optimizer step over this replica's micro-batches of step number ``step`` (it seeds dropout)."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token over all replicas, without learning from it; holds one batch at a time."""
        ...

    def tensors(self) -> Iterator[Shard]:
        """The training state, ``model.*`` and ``optim.*``: what this process saves of it. All processes together give
        every logical tensor once; they call this together, and take every turn together."""
        ...

    def scalars(self) -> dict[str, Any]:
        """The rest of the training state, as JSON; the same on every process."""
        ...

    def load(self, saved: Saved, scalars: dict[str, Any]) -> None:
        """Take over a saved state, whatever layout saved it; ConfigError when it is of another shape."""
        ...


def build(config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> Engine:
    """The engine that the settings name, with a freshly initialised model."""
    return lookup("engine", config.engine.name, ENGINES)(config, mesh, device, dtype)
