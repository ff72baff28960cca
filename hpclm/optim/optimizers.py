"""Selects the optimizer, and the learning rate and weight decay of each weight. Needs no PyTorch."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hpclm.base import registry
from hpclm.config.optimizers import OPTIMIZERS, OptimizerKind
from hpclm.parallel.placement import Fused, Placement

if TYPE_CHECKING:
    import torch

    from hpclm.config import OptimConfig


class OptimizedWeight(Protocol):
    """The view of a weight that an optimizer needs."""

    @property
    def name(self) -> str:
        """Logical name of the weight."""

    @property
    def parameter(self) -> Any:
        """The parameter to update: the weight, or this process's part of it."""

    @property
    def placement(self) -> Placement:
        """Shape of the whole weight, and its use."""


@dataclass(frozen=True)
class Matrix:
    """A unit that is updated whole: a weight, or one expert's matrix in a stack."""

    weight: OptimizedWeight
    shape: tuple[int, ...]
    fused: Fused | None = None
    """The matrices that it fuses along its rows; None: it is a single one."""
    run: slice | None = None
    """The matrix's values within this process's flattened values of the weight; None: all."""

    def of(self, values: "torch.Tensor") -> "torch.Tensor":
        """A view of the matrix's part of ``values``, which may be the weight, its gradient or its state."""
        return values if self.run is None else values.view(-1)[self.run]


class WholeMatrices(Protocol):
    """Hands whole matrices to the processes that work on them."""

    @property
    def matrices(self) -> Sequence[Matrix]:
        """All matrices, by number."""

    @property
    def rounds(self) -> Sequence[Sequence[int]]:
        """For each round, the numbers of the matrices that processes update at the same time."""

    @property
    def worked_on(self) -> Sequence[str]:
        """Names of the matrices that this process updates."""

    def __call__(
        self,
        numbers: Sequence[int],
        local_values: "Sequence[torch.Tensor]",
        work: "Callable[[int, torch.Tensor], torch.Tensor]",
    ) -> "Sequence[torch.Tensor]":
        """This process's values of each matrix in a round -> its values of ``work(number, matrix)``."""


class MatrixOptimizer(Protocol):
    """An optimizer that updates some weights as whole matrices, chosen by its row in OPTIMIZERS."""

    def share(self, exchange: WholeMatrices) -> None:
        """Called once, before the first step. ``exchange`` has the matrices of these weights in the optimizer's order. A stack of
        experts is replaced by the matrices of this process's experts."""


def rate_and_decay(name: str, placement: Placement, optim: "OptimConfig") -> tuple[float, float]:
    """A weight's factor on the learning rate, and its weight decay. Matching entries of optim.groups override optim.decayed; of
    several, the last one counts."""
    embedding = placement.use == "embedding"
    matrix = placement.dimensions >= 2
    decays = optim.decayed == "all" or (matrix and not (optim.decayed == "non_embedding" and embedding))
    factor = 1.0
    decay = optim.weight_decay if decays else 0.0
    for entry in optim.groups:
        if re.search(entry["match"], name):
            factor = float(entry.get("lr", factor))
            decay = float(entry.get("weight_decay", decay))
    return factor, decay


def kind_of(optim: "OptimConfig") -> OptimizerKind:
    """The row of the configured optimizer in OPTIMIZERS. For a user's optimizer: what it declares, which imports PyTorch. ConfigError if
    it cannot be used."""
    if optim.name in OPTIMIZERS:
        return OPTIMIZERS[optim.name]
    kind: OptimizerKind = registry.load("hpclm.optim.maker:load")(optim).kind
    return kind


def optimizer_of(weights: Sequence[OptimizedWeight], optim: "OptimConfig") -> "torch.optim.Optimizer":
    """The configured optimizer; the learning rate is set before each step."""
    path = OPTIMIZERS[optim.name].path if optim.name in OPTIMIZERS else "hpclm.optim.user_optimizer:make"
    optimizer: torch.optim.Optimizer = registry.load(path)(weights, optim)
    return optimizer
