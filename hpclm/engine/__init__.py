"""What trains: one optimizer step over one global batch, behind one small interface."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hpclm.config import RunConfig, supports
from hpclm.config.engine import ENGINES
from hpclm.config.supports import Supports
from hpclm.data.batches import Batch
from hpclm.engine.compiler import check_compiler
from hpclm.errors import ConfigError
from hpclm.model import gpt
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


def go_on(done: int) -> None:
    """Nothing keeps a step from its next micro-batch."""


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

    def train_step(
        self, batches: Sequence[Batch], lr: float, step: int, between: Callable[[int], None] = go_on
    ) -> StepResult:
        """One optimizer step over this replica's micro-batches of step number ``step`` (it seeds dropout).

        ``between`` is called between two micro-batches with how many are done, on every rank at the same places, by
        engines that can leave a step there: it may raise, and then weights and optimizer state are those from before.
        """
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


Maker = Callable[[RunConfig, Mesh, torch.device, torch.dtype], Engine]


def named(config: RunConfig, device: torch.device) -> Maker:
    """The engine that the settings name, not yet built; ConfigError where it, or what it needs, cannot be loaded, and for
    settings that ``device`` cannot follow."""
    lacking = list(config.engine.problems_without_gpu()) if device.type == "cpu" else []
    if lacking:
        raise ConfigError(lacking)
    maker = lookup("engine", config.engine.name, ENGINES)
    gpt.layers(config.model, config.engine, torch.float32, config.seed)  # which loads a block of the user's own
    if config.engine.compile:
        check_compiler()
    its: Supports | None = getattr(maker, "supports", None)
    if config.engine.name not in ENGINES and its:
        wrong = list(supports.problems(config.engine, config.parallel, config.optim.name, its))
        if wrong:
            raise ConfigError(wrong)
    return maker


def build(config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> Engine:
    """The engine that the settings name, with a freshly initialised model."""
    return named(config, device)(config, mesh, device, dtype)
