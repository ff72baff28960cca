"""The record of one process of a trial: losses, weights and gradients. Values are NumPy arrays, which a pickle can hold."""

import os
import signal
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpclm.engine import Engine, SavedState, Shard, StepResult, keep_going
from hpclm.engine.base import BaseEngine
from hpclm.engine.sharded_parameter import ShardedParameter, blocks
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.training.loop import TrainingLoop

NUDGE = 0.05  # standard deviation of the change to a weight in ``evaluated``: large enough to change the loss
NOT_METRICS = ("counted_tokens", "empty_micro_batches", "guarded")


class WeightPiece(NamedTuple):
    """A block of a logical weight."""

    name: str
    values: NDArray[Any]
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    start: tuple[int, ...]


@dataclass
class Record:
    """The observations of one process. If it has resumed, ``initial``, ``gradients``, ``updated`` and ``evaluated`` are empty."""

    first: int = 0
    """The step from which it resumed; 0 if it is new."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Loss, gradient norm, learning rate and all reports of each step."""
    initial: list[WeightPiece] = field(default_factory=list)
    """The weights before the first update."""
    gradients: list[WeightPiece] = field(default_factory=list)
    """Gradients of the first update."""
    updated: list[WeightPiece] = field(default_factory=list)
    """The weights after the first update."""
    evaluated: dict[str, float] = field(default_factory=dict)
    """Losses in evaluation before the first update: with unchanged weights (key ""), and with one weight of the first block changed slightly
    (key: its name)."""
    final: list[WeightPiece] = field(default_factory=list)
    """The weights at the end."""
    draws: bool = False
    """Whether blocks draw random numbers from PyTorch's default generator in training."""
    samples: list[str] = field(default_factory=list)
    """A digest of each of the first samples of the training data."""


class ObservedEngine:
    """Records the steps of an engine, and kills the process at the beginning of step ``kill_at``."""

    def __init__(self, engine: Engine, record: Record, kill_at: int | None):
        self.inner = engine
        self.record = record
        self.kill_at = kill_at

    def train_step(
        self, batches: Sequence[MicroBatch], lr: float, step: int, check_interrupt: Callable[[int], None] = keep_going
    ) -> StepResult:
        """See Engine."""
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        inner = self.inner
        record = self.record
        first = not step
        hooks = _watched(inner, record) if first and isinstance(inner, BaseEngine) else []
        result = inner.train_step(batches, lr, step, check_interrupt)
        for hook in hooks:
            hook.remove()
        numbers = {name: float(value) for name, value in result.numbers.items() if name not in NOT_METRICS}
        record.steps.append({**numbers, "lr": lr})
        if first:
            record.updated = list(weights(inner))
        return result

    def evaluate(self, batches: Iterable[MicroBatch]) -> float | None:
        """See Engine."""
        return self.inner.evaluate(batches)

    def averaged(self) -> AbstractContextManager[None]:
        """See Engine."""
        return self.inner.averaged()

    def tensors(self) -> Iterator[Shard]:
        """See StateSource."""
        return self.inner.tensors()

    def scalars(self) -> dict[str, Any]:
        """See StateSource."""
        return self.inner.scalars()

    def load(self, saved: SavedState, scalars: dict[str, Any]) -> None:
        """See Engine."""
        self.inner.load(saved, scalars)


def begin(loop: TrainingLoop, record: Record, kill_at: int | None) -> None:
    """Record the initial state of the run, and observe its steps."""
    record.first = loop.run.data.begin.step
    if not record.first:
        record.initial = list(weights(loop.engine))
        if isinstance(loop.engine, BaseEngine):
            record.evaluated = evaluated(loop, loop.engine)
    loop.stepper.engine = ObservedEngine(loop.engine, record, kill_at)


def end(loop: TrainingLoop, record: Record) -> None:
    """Record the final weights of the run."""
    record.final = list(weights(loop.engine))


def weights(engine: Engine) -> Iterator[WeightPiece]:
    """The weights that this process holds; for an engine that is not a BaseEngine, the weights that it saves."""
    if not isinstance(engine, BaseEngine):
        for shard in engine.tensors():
            if shard.name.startswith("model."):
                yield _piece(shard.name.removeprefix("model."), shard.tensor, shard.shape, shard.start)
        return
    for weight in engine.weights:
        yield from _pieces(engine, weight, engine.state.values(weight))


def _pieces(engine: BaseEngine, weight: ShardedParameter, values: Tensor) -> Iterator[WeightPiece]:
    """``values`` as blocks of a whole tensor: this process's values of ``weight``, or of a tensor with its shape, such as its gradient."""
    part = engine.state.local_part(weight)
    for start, block in blocks(part, part.begin, values.detach().flatten()[: part.count], engine.mesh.tp):
        yield _piece(weight.name, block, weight.shape, start)


def _piece(name: str, values: Tensor, shape: Sequence[int], start: Sequence[int]) -> WeightPiece:
    return WeightPiece(name, values.detach().float().cpu().numpy().copy(), tuple(shape), tuple(start))


def _watched(engine: BaseEngine, record: Record) -> list[Any]:
    """Hooks that record the gradients of the next update, and whether blocks draw random numbers."""
    before: dict[int, Tensor] = {}

    def gradients(*_: Any) -> None:
        for weight in engine.weights:
            gradient = engine.state.gradient(weight)
            if gradient is not None:
                record.gradients += _pieces(engine, weight, gradient)

    def enter(block: nn.Module, *_: Any) -> None:
        before[id(block)] = torch.get_rng_state()

    def leave(block: nn.Module, *_: Any) -> None:
        if not torch.equal(before[id(block)], torch.get_rng_state()):
            record.draws = True

    hooks: list[Any] = [engine.optimizer.register_step_pre_hook(gradients)]
    for _, block in blocks_of(engine):
        hooks += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    return hooks


def blocks_of(engine: BaseEngine) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of this process, by name."""
    for stack in engine.model_stacks:
        yield from stack.blocks.items()


def evaluated(loop: TrainingLoop, engine: BaseEngine) -> dict[str, float]:
    """The loss in evaluation with the unchanged weights, and with each weight of the first block changed slightly; a collective."""
    batches = loop.run.data.train
    size = loop.config.batch.global_size
    names = set[str]()
    mine = {weight.name: weight for weight in engine.weights if weight.name.startswith("block0.")}
    for others in loop.context.all_gather(sorted(mine)):
        names |= {*others}

    def loss() -> float:
        engine.refresh()
        value = engine.evaluate(batches.take(0, size))
        return float("nan") if value is None else value

    losses = {"": loss()}
    for name in sorted(names):
        weight = mine.get(name)
        if weight is None:  # another process holds it
            losses[name] = loss()
            continue
        values = engine.state.values(weight)
        kept = values.clone()
        _nudge(engine, weight, values)
        losses[name] = loss()
        values.copy_(kept)
    engine.refresh()
    return losses


def _nudge(engine: BaseEngine, weight: ShardedParameter, values: Tensor) -> None:
    """Change this process's values of a weight by amounts that depend only on the weight's name and the position."""
    part = engine.state.local_part(weight)
    draw = torch.Generator().manual_seed(zlib.crc32(weight.name.encode()))
    whole = torch.randn(weight.shape, generator=draw) * NUDGE
    for start, block in blocks(part, part.begin, values.view(-1)[: part.count], engine.mesh.tp):
        places = tuple(slice(low, low + size) for low, size in zip(start, block.shape, strict=True))
        block.add_(whole[places])
