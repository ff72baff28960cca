"""The engine interface: one optimizer step over one global batch."""

import logging
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from hpclm.config import RunConfig
from hpclm.config.engine import ENGINES, unsupported
from hpclm.config.model import BLOCKS
from hpclm.config.supports import Supports
from hpclm.data.batches import Batch
from hpclm.errors import ConfigError
from hpclm.model import gpt
from hpclm.parallel.mesh import Mesh
from hpclm.registry import a_class, lookup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step."""

    loss: float  # mean over the step's tokens, before the update
    grad_norm: float  # global L2 norm before clipping
    loss_scale: float = 1.0
    skipped: bool = False  # the weights did not change because the loss or gradients were not finite
    seconds: Mapping[str, float] = field(default_factory=dict)  # of the step's phases, with log.timers

    def values(self) -> tuple["float | Tensor", ...]:
        """Loss, gradient norm, and 1 if the step was skipped, without a wait for the device."""
        return self.loss, self.grad_norm, float(self.skipped)

    @property
    def finished(self) -> bool:
        """Whether the host knows that the device has finished the step."""
        return True


class DeviceResult(StepResult):
    """The result of a step that the device may still be computing: to look at its numbers is to wait for them."""

    on_device: Tensor

    def __init__(self, on_device: Tensor, loss_scale: float = 1.0, seconds: Mapping[str, float] = MappingProxyType({})):
        """``on_device``: [3] loss, gradient norm, and 1 if the step was skipped."""
        vars(self).update(on_device=on_device, loss_scale=loss_scale, seconds=seconds)

    @classmethod
    def of(
        cls,
        loss: Tensor,
        grad_norm: Tensor | float,
        skipped: Tensor | bool,
        loss_scale: float,
        seconds: Mapping[str, float] = MappingProxyType({}),
    ) -> "DeviceResult":
        """The result with this ``loss``, of which the host may know the other numbers."""
        norm, bad = (
            value.double() if isinstance(value, Tensor) else loss.new_full((), float(value), dtype=torch.float64)
            for value in (grad_norm, skipped)
        )
        return cls(torch.stack([loss.double(), norm.to(loss.device), bad]), loss_scale, seconds)

    def values(self) -> tuple[float | Tensor, ...]:
        """Scalars on the device."""
        return self.on_device.unbind()

    @property
    def finished(self) -> bool:
        """Whether somebody has waited for it."""
        return self.on_device.device.type == "cpu" or "_read" in vars(self)

    @cached_property
    def _read(self) -> list[float]:
        return self.on_device.tolist()

    @property
    def loss(self) -> float:
        """Mean over the step's tokens, before the update."""
        return self._read[0]

    @property
    def grad_norm(self) -> float:
        """Global L2 norm before clipping."""
        return self._read[1]

    @property
    def skipped(self) -> bool:
        """Whether the weights did not change."""
        return bool(self._read[2])


@dataclass(frozen=True)
class Shard:
    """A block of one logical tensor that this process holds and saves."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]  # offset of the block in the whole tensor

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> "Shard":
        """A shard that is the whole tensor."""
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def keep_going(done: int) -> None:
    """The default for ``between``: always continue with the next micro-batch."""


class SavedState(Protocol):
    """The logical tensors of a saved state."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every whole tensor by name."""
        ...

    def block(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """A block of one of them."""
        ...


class Engine(Protocol):
    """The interface between the training loop and an engine."""

    def train_step(
        self, batches: Sequence[Batch], lr: float, step: int, between: Callable[[int], None] = keep_going
    ) -> StepResult:
        """One optimizer step over this replica's micro-batches of step number ``step`` (it seeds dropout).

        The result may be a DeviceResult, which saves a wait for the device.

        Engines that can abandon a step call ``between`` between micro-batches, on every rank at the same points, with the
        number that are done. It may raise; weights and optimizer state are then unchanged.
        """
        ...

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token over all replicas, without an update; holds one batch at a time."""
        ...

    def tensors(self) -> Iterator[Shard]:
        """This process's shards of the training state, ``model.*`` and ``optim.*``. All processes together yield every
        logical tensor exactly once. A collective: all processes must iterate it in lockstep."""
        ...

    def scalars(self) -> dict[str, Any]:
        """The rest of the training state, as JSON; the same on every process."""
        ...

    def load(self, saved: SavedState, scalars: dict[str, Any]) -> None:
        """Load a state saved by any layout; ConfigError if shapes differ."""
        ...


CHECK = a_class("train_step", "evaluate", "tensors", "scalars", "load", made_with=("config", "mesh", "device", "dtype"))
Maker = Callable[[RunConfig, Mesh, torch.device, torch.dtype], Engine]


def named(config: RunConfig, device: torch.device) -> Maker:
    """The class of the configured engine; ConfigError if it or its requirements cannot be loaded, or if ``device`` does not
    support the settings."""
    problems = list(config.engine.problems_without_gpu()) if device.type == "cpu" else []
    if problems:
        raise ConfigError(problems)
    maker = lookup("engine", config.engine.name, ENGINES, CHECK)
    gpt.layers(config.model, config.engine, torch.float32, config.seed)  # loads a user-defined block
    if config.engine.compile:
        check_compiler()
    check_supports(config, maker)
    compiled, why = compiles(config, device)
    if why:
        log.info("torch.compile is off: %s", why)

    def make(run: RunConfig, *where: Any) -> Engine:
        changed = compiled and not run.engine.compile
        return maker(replace(run, engine=replace(run.engine, compile=True)) if changed else run, *where)

    return make


COMPILED = ("native", "fsdp2")
"""Engines that compile on GPUs unless they are told not to."""


def compiles(config: RunConfig, device: torch.device) -> tuple[bool, str | None]:
    """Whether to use torch.compile, and why not where it would be used by default."""
    engine, model = config.engine, config.model
    if engine.compile is not None or device.type == "cpu":
        return bool(engine.compile), None
    reasons = {
        f"engine {engine.name!r} is compiled only with engine.compile=true": engine.name not in COMPILED,
        "engine.anomaly=true finds nothing in compiled blocks": engine.anomaly,
        f"model.block={model.block} is compiled only with engine.compile=true": model.block not in BLOCKS,
        "model.kernels=apex cannot be compiled into the blocks": model.kernels != "torch",
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    why = why or (f"it needs {lacking}, which was not found" if (lacking := lacking_compiler()) else None)
    return why is None, why


def lacking_compiler() -> str | None:
    """What torch.compile needs and this machine does not have."""
    compiler = next(filter(shutil.which, ("g++", "clang++", "gcc")), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not compiler:
        return "a C++ compiler on the PATH"
    return None if header.exists() else str(header)


def check_compiler() -> None:
    """ConfigError if torch.compile cannot work on this machine."""
    missing = lacking_compiler()
    if missing:
        raise ConfigError(
            f"engine.compile=true needs {missing}, which was not found; set engine.compile=false, "
            f"or install it (Debian: apt-get install g++ python3-dev)"
        )


def check_supports(config: RunConfig, maker: Maker) -> None:
    """ConfigError if a user-defined engine declares that it does not support the settings."""
    its: Supports | None = getattr(maker, "supports", None)
    if config.engine.name not in ENGINES and its:
        wrong = list(unsupported(config.engine, config.parallel, config.optim.name, its))
        if wrong:
            raise ConfigError(wrong)


def build(config: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> Engine:
    """The configured engine, with a freshly initialised model."""
    return named(config, device)(config, mesh, device, dtype)
