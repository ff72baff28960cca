"""The engine interface: one optimizer step over one global batch."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.base.registry import class_check, load, lookup
from hpclm.config import EngineSettings
from hpclm.config.engine import ENGINES
from hpclm.config.model import BLOCKS
from hpclm.config.supports import OPTIONAL, SUPPORTS, Asking, Supports, unsupported
from hpclm.engine.user_optimizers import check_optimizer
from hpclm.engine.weight_names import check_weights
from hpclm.model import gpt
from hpclm.node import hardware
from hpclm.parallel.mesh import Compute
from hpclm.parallel.micro_batch import MicroBatch

log = logging.getLogger(__name__)

DECLARE = "your own engine declares further features in `supports` (hpclm docs your-own-code)"


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, which the device may still be computing."""

    metrics: Mapping[str, float | Tensor]
    """Named scalars, the same names on every rank. ``loss`` is the mean over the step's tokens, before the update. ``grad_norm`` is the
    global L2 norm before clipping. ``skipped`` is 1 if loss or gradients were not finite, so that the weights did not change. Engines
    may add others. All are reduced together and written to metrics.jsonl under their names. ``counted_tokens`` and
    ``empty_micro_batches`` (see engine.step.StepInputs) are written only if they matter."""
    loss_scale: float = 1.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the step, with log.timers."""
    expert_tokens: Tensor | None = None
    """[layers with experts, E] tokens of the global batch routed to each expert, the same on every rank; None without experts."""

    @property
    def finished(self) -> bool:
        """True if the metrics can be read without waiting for the device."""
        queued = [value for value in self.metrics.values() if isinstance(value, Tensor)]
        return "numbers" in vars(self) or all(value.device.type == "cpu" for value in queued)

    @cached_property
    def numbers(self) -> dict[str, float]:
        """The metrics as Python numbers; waits for the device."""
        queued = {name: value.double() for name, value in self.metrics.items() if isinstance(value, Tensor)}
        # one copy from the device for all metrics: .item() would wait once for each
        read = dict(zip(queued, torch.stack([*queued.values()]).tolist(), strict=True)) if queued else {}
        return {**self.metrics, **read}

    @property
    def loss(self) -> float:
        """Mean over the step's tokens, before the update."""
        return self.numbers["loss"]

    @property
    def grad_norm(self) -> float:
        """Global L2 norm before clipping."""
        return self.numbers["grad_norm"]

    @property
    def skipped(self) -> bool:
        """True if the weights did not change."""
        return bool(self.numbers["skipped"])


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
    """The default for ``check_interrupt``: always continue with the next micro-batch."""


class SavedState(Protocol):
    """The logical tensors of a saved state."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every whole tensor by name."""
        ...

    def block(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """A block of the tensor ``name``."""
        ...


class StateSource(Protocol):
    """A training state to save, one tensor after the other: an engine's or an imported one."""

    def tensors(self) -> Iterator[Shard]:
        """This process's shards of the training state, ``model.*``, ``optim.*`` and ``ema.*``. All processes together yield every
        logical tensor exactly once. A collective: all processes must iterate it in lockstep."""
        ...

    def scalars(self) -> dict[str, Any]:
        """The rest of the training state, as JSON; the same on every process."""
        ...


class Engine(StateSource, Protocol):
    """The interface between the training loop and an engine."""

    def train_step(
        self, batches: Sequence[MicroBatch], lr: float, step: int, check_interrupt: Callable[[int], None] = keep_going
    ) -> StepResult:
        """Run optimizer step number ``step`` over this replica's micro-batches; ``step`` seeds dropout.

        Engines that can abandon a step call ``check_interrupt`` between micro-batches, on every rank at the same points, with the number
        of finished micro-batches. It may raise; weights and optimizer state are then unchanged.
        """
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> float | None:
        """Mean loss over the counted tokens of all replicas, without an update; None if no token counts. Holds one batch at a time."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Inside this context, ``evaluate`` measures the average of the weights. Only called with optim.ema."""
        ...

    def load(self, saved: SavedState, scalars: dict[str, Any]) -> None:
        """Load a state saved by any layout; ConfigError if shapes differ."""
        ...


CHECK = class_check("train_step", "evaluate", "tensors", "scalars", "load", made_with=("config", "compute"))
Maker = Callable[[EngineSettings, Compute], Engine]


def build(config: EngineSettings, compute: Compute) -> Engine:
    """Build the configured engine with a freshly initialised model."""
    maker = engine_class(config, compute.device)
    compiled, reason = compiles(config, compute.device)
    if reason:
        log.info("torch.compile is off: %s", reason)
    # null: leave the blocks uncompiled, but compile parts that need it
    decided = compiled or (None if compiles_attention(config, compute.device) else False)
    return maker(replace(config, engine=replace(config.engine, compile=decided)), compute)


def engine_class(config: EngineSettings, device: torch.device) -> Maker:
    """The class of the configured engine; ConfigError if it cannot be loaded, or if ``device`` does not support the settings."""
    problems = config.engine.missing_libraries()
    if device.type == "cpu":
        problems += config.engine.problems_without_gpu()
    problems += hardware.problems_of_fp8(config.engine, device)
    if problems:
        raise ConfigError(problems)
    maker = lookup("engine", config.engine.name, ENGINES, CHECK)
    reason = unavailable(config.engine.name)
    if reason:
        raise ConfigError(reason)
    specs = gpt.layers(config.model, config.engine, torch.float32, config.seed)  # loads a user-defined block
    if config.model.block not in BLOCKS and config.parallel.pipeline > 1:
        gpt.check_blocks(specs)
    check_supports(config, maker)
    if config.model.freeze or config.optim.groups:
        check_weights(config, specs)
    check_optimizer(
        config, getattr(maker, "supports", SUPPORTS.get(config.engine.name)), getattr(maker, "sharded", False)
    )
    return maker


def unavailable(name: str) -> str | None:
    """The reason why the installed PyTorch cannot run the engine ``name``, or None. Imports the engine."""
    supports = SUPPORTS.get(name)
    if supports is None or supports.unavailable is None:
        return None
    reason: str | None = load(supports.unavailable)()
    return reason


def check_supports(config: Asking, maker: Maker) -> None:
    """ConfigError unless a user-defined engine declares in ``supports`` that it supports the settings.

    An engine without ``supports`` trains with data and tensor parallelism alone; it may read any option of engine.*.
    """
    name = config.engine.name
    if name in ENGINES:
        return
    declared: Supports = getattr(maker, "supports", None) or Supports(name, options=OPTIONAL)
    problems = unsupported(config, declared)
    if problems and not hasattr(maker, "supports"):
        problems = [*problems, DECLARE]
    if problems:
        raise ConfigError(problems)


def compiles(config: EngineSettings, device: torch.device) -> tuple[bool, str | None]:
    """Whether to use torch.compile, and the reason if it is on by default but cannot be used."""
    engine = config.engine
    model = config.model
    # off by default on CPUs, where it gained nanoGPT half a percent (1,382 to 1,388 tokens/s)
    if engine.compile is not None or device.type == "cpu":
        return bool(engine.compile), None
    supports = SUPPORTS.get(engine.name)
    reasons = {
        f"engine {engine.name!r} is compiled only with engine.compile=true": not (supports and supports.compiled),
        f"model.block={model.block} is compiled only with engine.compile=true": model.block not in BLOCKS,
        "model.kernels=apex cannot be compiled into the blocks": model.kernels != "torch",
        "engine.offload_activations=true changes strides, on which compiled code relies": engine.offload_activations,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    return reason is None, reason


def compiles_attention(config: EngineSettings, device: torch.device) -> bool:
    """Whether FlexAttention may be compiled separately if the blocks are not compiled."""
    return device.type == "cuda" and config.engine.compile is None and not config.engine.offload_activations
