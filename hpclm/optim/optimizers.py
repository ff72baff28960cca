"""The configured optimizer, and the learning rate and weight decay of each weight. Needs no PyTorch."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hpclm import registry
from hpclm.config.optimizers import OPTIMIZERS, OptimizerKind, dimensions

if TYPE_CHECKING:
    import torch

    from hpclm.config import ModelConfig, OptimConfig


class Weight(Protocol):
    """A weight as an optimizer needs to know it."""

    @property
    def name(self) -> str:
        """Logical name."""

    @property
    def parameter(self) -> Any:
        """What is updated: the weight, or the part of it that this process keeps."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole weight."""


@dataclass(frozen=True)
class Matrix:
    """What is updated as a whole: a weight, or one expert's matrix in a stack of them."""

    weight: Weight
    shape: tuple[int, ...]
    run: slice | None = None
    """Of the values of the weight that this process has, flattened, those of this matrix; None: all."""

    def of(self, values: "torch.Tensor") -> "torch.Tensor":
        """The part of the weight's ``values``, its gradient or its state that belongs to the matrix, as a view."""
        return values if self.run is None else values.view(-1)[self.run]


class Exchange(Protocol):
    """Hands whole matrices to the processes that work on them."""

    @property
    def matrices(self) -> Sequence[Matrix]:
        """All, by number."""

    @property
    def rounds(self) -> Sequence[Sequence[int]]:
        """Numbers of the matrices that are worked on at the same time."""

    @property
    def worked_on(self) -> Sequence[str]:
        """Names of the matrices that this process works on."""

    def __call__(
        self,
        numbers: Sequence[int],
        local_values: "Sequence[torch.Tensor]",
        work: "Callable[[int, torch.Tensor], torch.Tensor]",
    ) -> "Sequence[torch.Tensor]":
        """``local_values``: this process's values of each of a round's matrices -> its values of ``work(number, matrix)``."""


class MatrixOptimizer(Protocol):
    """An optimizer that updates some weights as whole matrices: those that its row in OPTIMIZERS says."""

    def share(self, exchange: Exchange, model: "ModelConfig") -> None:
        """Called once, before the first step. ``exchange`` has these weights in the order in which the optimizer got them, and instead of
        a stack the matrices of the experts that this process has."""


def rate_and_decay(name: str, shape: Sequence[int], optim: "OptimConfig") -> tuple[float, float]:
    """Factor on the learning rate, and weight decay, of a weight: by optim.decayed, and every entry of optim.groups in order."""
    embedding = name.startswith(("tokens.", "entry."))
    matrix = dimensions(name, shape) >= 2
    decays = optim.decayed == "all" or (matrix and not (optim.decayed == "non_embedding" and embedding))
    factor, decay = 1.0, optim.weight_decay if decays else 0.0
    for entry in optim.groups:
        if re.search(entry["match"], name):
            factor, decay = float(entry.get("lr", factor)), float(entry.get("weight_decay", decay))
    return factor, decay


def kind_of(optim: "OptimConfig") -> OptimizerKind:
    """The row of the configured optimizer in OPTIMIZERS; of one of the user's own, what it declares and what a trial shows (which imports
    PyTorch). ConfigError if that cannot be used."""
    if optim.name in OPTIMIZERS:
        return OPTIMIZERS[optim.name]
    kind: OptimizerKind = registry.load("hpclm.optim.user_optimizer:load")(optim).kind
    return kind


def optimizer_of(weights: Sequence[Weight], optim: "OptimConfig") -> "torch.optim.Optimizer":
    """The configured optimizer; the learning rate is set before each step."""
    path = OPTIMIZERS[optim.name].path if optim.name in OPTIMIZERS else "hpclm.optim.user_optimizer:make"
    optimizer: torch.optim.Optimizer = registry.load(path)(weights, optim)
    return optimizer
