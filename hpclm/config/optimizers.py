"""The optimizers by name: their constructors, the state that each keeps per weight, and the settings that each reads.

Needs no PyTorch. A matrix is [A, B].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

Settings = Any
"""An OptimConfig. It cannot be imported here, because its definition uses this table."""
Placement = Any
"""A weight's hpclm.parallel.placement.Placement: its shape, its dimensions and its use."""


@dataclass(frozen=True)
class MatrixCost:
    """The cost of updating one weight as a whole matrix, for the process that updates it."""

    flops: float = 0.0
    element: int = 4
    """Bytes of each exchanged value."""
    scratch: float = 0.0
    """Bytes of intermediate results."""


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer."""

    path: str
    """module:name of the function that constructs it from (weights, optim)."""
    summary: str
    """For the documentation of optim.name."""
    state: Callable[[Placement], Sequence[str]]
    """The names of the tensors in a weight's state, in fp32 and of its shape; checkpoints store them as ``optim.TENSOR.WEIGHT``."""
    matrices: Callable[[Placement], bool] | None = None
    """Whether one process updates a weight as a whole matrix; None: False for every weight."""
    cost: Callable[[Settings, Sequence[tuple[int, int]]], MatrixCost] = lambda optim, parts: MatrixCost()
    """The cost of a weight that is updated as a whole matrix; ``parts``: the shapes (A, B) of the matrices that it fuses."""
    settings: tuple[str, ...] = ()
    """The settings under ``optim`` that it reads, except those that every optimizer reads."""
    exact: Mapping[str, Any] = field(default_factory=dict)
    """The values of settings with which it computes everything in fp32."""
    family: str = "adamw"
    """Optimizers of one family can resume from each other's state."""
    reference: str | None = None
    """The name of a plain PyTorch optimizer with the same updates; None: this one."""
    offloaded: bool = False
    """Whether it updates weights in CPU memory, and needs engine.offload."""

    def bytes_per_parameter(self, placement: Placement) -> int:
        """Bytes of state per parameter of a weight."""
        return 4 * len(self.state(placement))


def moments(placement: Placement) -> Sequence[str]:
    """Adam's moments."""
    return ("exp_avg", "exp_avg_sq")


def hidden_matrix(placement: Placement) -> bool:
    """Whether a weight is a matrix of a block, or a stack of such matrices; False for embeddings, output projection, norms, biases.

    The router's weight is one of them, as in Megatron-LM and in Moonlight (Liu et al. 2025), where Muon made the largest difference to
    routers.
    """
    return bool(placement.dimensions == 2 and placement.use == "hidden")


def momentum(placement: Placement) -> Sequence[str]:
    """Muon's momentum for the blocks' matrices, and Adam's moments for the other weights."""
    return ("momentum_buffer",) if hidden_matrix(placement) else moments(placement)


def newton_schulz(optim: Settings, parts: Sequence[tuple[int, int]]) -> MatrixCost:
    """The cost of Muon's iterations: X X^T, its square, and their sum times X (Jordan et al. 2024)."""
    values = sum(map(prod, parts))
    element = 2 if optim.newton_schulz_type == "bf16" else 4
    if not optim.split:
        parts = [(sum(rows for rows, _ in parts), parts[0][1])]
    small = [(min(part), max(part)) for part in parts]
    flops = sum(optim.newton_schulz_steps * (4 * a * a * b + 2 * a**3) for a, b in small)
    return MatrixCost(flops, element, element * 2 * (values + max(a for a, _ in small) ** 2))


ADAM = ("betas", "eps")
MUON = ("momentum", "nesterov", "newton_schulz_steps", "newton_schulz_type", "adjust", "split")
OPTIMIZERS = {
    "adamw": OptimizerKind("hpclm.optim.adamw:fused_adamw", "PyTorch's AdamW", moments, settings=ADAM),
    "apex_adam": OptimizerKind(
        "hpclm.optim.adamw:apex_adam", "NVIDIA apex's", moments, settings=ADAM, reference="adamw"
    ),
    "cpu_adam": OptimizerKind(
        "hpclm.engine.deepspeed.library:cpu_adam",
        "DeepSpeed's, for offloading",
        moments,
        settings=ADAM,
        reference="adamw",
        offloaded=True,
    ),
    "muon": OptimizerKind(
        "hpclm.optim.muon:Muon",
        "Muon for the blocks' matrices, AdamW for the rest",
        momentum,
        matrices=hidden_matrix,
        cost=newton_schulz,
        settings=(*ADAM, *MUON),
        exact={"newton_schulz_type": "fp32"},
        family="muon",
    ),
}


READ_BY_SOME = tuple(dict.fromkeys(name for kind in OPTIMIZERS.values() for name in kind.settings))
"""Settings under ``optim`` that not every optimizer reads."""
OF_USERS = OptimizerKind("", "of your own", moments, family="")
"""A user's own optimizer before its import. Its state is assumed to be AdamW's."""


def row(name: str) -> OptimizerKind:
    """The optimizer with this optim.name; OF_USERS for a user's own."""
    return OPTIMIZERS.get(name, OF_USERS)


def readers(setting: str) -> list[str]:
    """The optimizers that read a setting under ``optim``; empty if all do."""
    return [name for name, kind in OPTIMIZERS.items() if setting in kind.settings]


def optimizers_with(setting: str) -> str:
    """The condition (see setting.Condition) of a setting that only some optimizers read."""
    return f"optim.name={'|'.join(readers(setting))}|own"


def optimizers_help() -> str:
    """The documentation of optim.name."""
    shipped = "; ".join(f"{name}: {kind.summary}" for name, kind in OPTIMIZERS.items())
    return f"{shipped}; or package.module:Name (hpclm docs your-own-code)."
