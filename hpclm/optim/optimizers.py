"""The optimizers by name: what makes each, and which state it keeps of a weight. Needs no PyTorch."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hpclm import registry

if TYPE_CHECKING:
    import torch

    from hpclm.config import OptimConfig

MATRIX = "block0.mlp.up.weight", (1, 1)
"""Name and shape of a matrix, which is what most parameters belong to."""


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
class OptimizerKind:
    """One optimizer."""

    path: str
    """module:name of the function that makes it from (weights, optim)."""
    state: Callable[[str, Sequence[int]], tuple[str, ...]]
    """Name and shape of a weight -> names of the tensors kept for it, each of that shape and in fp32; checkpoints have them under
    these names."""
    family: str = "adamw"
    """The same for optimizers that can resume from each other's state."""

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of state for a parameter of a matrix."""
        return 4 * len(self.state(*MATRIX))


def rate_and_decay(name: str, shape: Sequence[int], optim: "OptimConfig") -> tuple[float, float]:
    """Factor on the learning rate, and weight decay, of a weight: by optim.decayed, and every entry of optim.groups in order."""
    embedding = name.startswith(("tokens.", "entry."))
    decays = optim.decayed == "all" or (len(shape) >= 2 and not (optim.decayed == "non_embedding" and embedding))
    factor, decay = 1.0, optim.weight_decay if decays else 0.0
    for entry in optim.groups:
        if re.search(entry["match"], name):
            factor, decay = float(entry.get("lr", factor)), float(entry.get("weight_decay", decay))
    return factor, decay


def moments(name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Adam's."""
    return "exp_avg", "exp_avg_sq"


def orthogonal(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates a weight: a matrix of a block, not embeddings, the output projection, norms or biases."""
    return len(shape) == 2 and name.startswith("block")


def momentum(name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Muon's, and Adam's moments of the other weights."""
    return ("momentum_buffer",) if orthogonal(name, shape) else moments(name, shape)


OPTIMIZERS = {
    "adamw": OptimizerKind("hpclm.optim.adamw:fused_adamw", moments),
    "apex_adam": OptimizerKind("hpclm.optim.adamw:apex_adam", moments),
    "cpu_adam": OptimizerKind("hpclm.engine.deepspeed.library:cpu_adam", moments),
    "muon": OptimizerKind("hpclm.optim.muon:Muon", momentum, "muon"),
}


def optimizer_of(weights: Sequence[Weight], optim: "OptimConfig") -> "torch.optim.Optimizer":
    """The configured optimizer; the learning rate is set before each step."""
    made: torch.optim.Optimizer = registry.load(OPTIMIZERS[optim.name].path)(weights, optim)
    return made
