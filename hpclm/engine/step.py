"""The parts of a training step: inputs, seeds, token weights, gradient norm, timers."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpclm.config import EngineSettings
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.model import gpt
from hpclm.model.dropout import mix_seed
from hpclm.parallel.collectives import all_reduce
from hpclm.parallel.mesh import Axis, Compute, Mesh
from hpclm.parallel.micro_batch import MicroBatch, ModelOutput


@dataclass(frozen=True)
class StepInputs:
    """The micro-batches of one replica in a step."""

    batches: Sequence[MicroBatch]
    """The micro-batches with seeds and token weights; the weighted losses of all replicas sum to the mean loss times ``factor``."""
    counted: Tensor
    """A scalar: the step's counted tokens on all replicas; with loss_norm=microbatch, on this one."""
    empty: Tensor
    """A scalar: this replica's micro-batches without a counted token."""
    factor: float
    """Factor on the losses, and so on the gradients."""
    check_interrupt: Callable[[int], None]
    """See Engine.train_step."""


def step_inputs(
    config: EngineSettings,
    mesh: Mesh,
    batches: Sequence[MicroBatch],
    step: int,
    factor: float,
    check_interrupt: Callable[[int], None],
) -> StepInputs:
    """The inputs of step number ``step``."""
    count = len(batches)
    drawn = seeds(config.seed, step, count, mesh) if gpt.random(config.model) else [None] * count
    weigh = equal_weights if config.all_tokens_count else token_weights
    weights, counted, empty = weigh(batches, config.loss_norm, mesh)
    weighted = [
        batch.weighted(weight if factor == 1.0 else weight * factor, seed)
        for batch, weight, seed in zip(batches, weights, drawn, strict=True)
    ]
    return StepInputs(weighted, counted, empty, factor, check_interrupt)


NO_RANK = 1 << 32
"""For numbers that all ranks draw alike."""


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed the global generators of PyTorch, Python and NumPy, which user-defined blocks may use, from seed, step and rank."""
    # rank 0 draws the same numbers as a single process; SeedSequence makes neighbouring seeds independent
    entropy = [seed, step, rank] if rank else [seed, step]
    drawn = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
    torch.manual_seed(int(drawn[0] >> 1))
    random.seed(int(drawn[1]))
    # NumPy's global generator takes 32 bits
    np.random.seed(int(drawn[1]) % 2**32)


def seeds(seed: int, step: int, count: int, mesh: Mesh) -> list[int]:
    """The seed of each of this replica's ``count`` micro-batches, independent of the number of replicas."""
    # by the micro-batch's position in the global batch, which does not depend on the number of replicas
    return [mix_seed(seed, step, number * mesh.replicas + mesh.replica) for number in range(count)]


def token_weights(batches: Sequence[MicroBatch], loss_norm: str, mesh: Mesh) -> tuple[list[Tensor], Tensor, Tensor]:
    """[B, T] fp32 token weights of each micro-batch, such that the weighted losses of all replicas sum to the mean loss; then
    ``counted`` and ``empty`` of StepInputs."""
    masks = [batch.mask() for batch in batches]
    counts = torch.stack([mask.sum() for mask in masks])
    # Megatron-LM's mean of means: if masks differ, a token weighs more in a micro-batch with fewer counted tokens
    if loss_norm == "microbatch":
        counts = all_reduce(counts, mesh.cp)
        # a micro-batch without a counted token has a loss of 0, not NaN
        at_least_one = counts.clamp(min=1)
        weights = [mask / (n * len(masks) * mesh.replicas) for mask, n in zip(masks, at_least_one, strict=True)]
        return weights, counts.sum(), (counts == 0).sum()
    # divide by the tokens of the whole step: the loss does not depend on the division into micro-batches and replicas
    total = all_reduce(counts.sum(), mesh.dp)
    return [mask / total.clamp(min=1) for mask in masks], total, torch.zeros_like(total)


def equal_weights(batches: Sequence[MicroBatch], loss_norm: str, mesh: Mesh) -> tuple[list[Tensor], Tensor, Tensor]:
    """The same as token_weights(), to the last bit, for data without a loss mask, and without communication."""
    tokens = batches[0].tokens
    count = len(batches)
    if any(batch.loss_mask is not None for batch in batches):
        raise ValueError("a micro-batch has a loss mask, although EngineSettings.all_tokens_count is true")
    total = tokens.numel() * count * mesh.dp.size
    weights = torch.full_like(tokens, 1 / total, dtype=torch.float32)
    counted = weights.new_full((), total // mesh.replicas if loss_norm == "microbatch" else total)
    return [weights] * count, counted, torch.zeros_like(counted)


@torch.no_grad()
def mean_loss(
    forward: Callable[[MicroBatch], ModelOutput], batches: Iterable[MicroBatch], device: torch.device, world: Axis
) -> float | None:
    """Mean loss per counted token, in nats, over the micro-batches of all replicas; None if no token counts. Holds one at a time."""
    # fp32 would lose digits over millions of tokens, more with every batch
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        mask = batch.mask()
        sums += torch.stack([forward(batch.weighted(mask)).value.double(), mask.sum(dtype=torch.float64)])
    total, counted = all_reduce(sums, world).tolist()
    return total / counted if counted else None


class GlobalNorm:
    """The global L2 norm of gradients or updates, in fp32: each weight counts once, however it is split or replicated."""

    def __init__(self, weights: Sequence[ShardedParameter], compute: Compute, sharded: bool, split: bool = False):
        """``sharded``: each replica holds only a part of every weight, apart from those that data-parallel ranks split by placement,
        such as experts. ``split``: some stage has such weights."""
        self.weights = weights
        self.compute = compute
        self.sharded = sharded
        self.split = split

    def __call__(self, values: Sequence[Tensor | None]) -> Tensor:
        """Norm of ``values``, one tensor for each weight; a collective."""
        mesh = self.compute.mesh
        first = mesh.tp.first
        counted = [
            (weight, value)
            for weight, value in zip(self.weights, values, strict=True)
            if value is not None and not weight.duplicate and (weight.placement.dim is not None or first)
        ]
        # values that all tensor-parallel ranks hold count on the first of them only, as in Megatron-LM
        norm = torch.nn.utils.get_total_norm([value for weight, value in counted if weight.placement.data_ranks == 1])
        # not squared and rooted again, which would change the last bits of a single process's result
        if mesh.model.size == 1 and not self.sharded and not self.split:
            return norm
        device = self.compute.device
        square = all_reduce(norm.to(device, torch.float32).square(), mesh.model)
        # summed over all replicas, although some hold the same values: every rank gets the same bits
        if self.sharded:
            square = all_reduce(square, mesh.dp) / mesh.replicate.size
        if self.split:  # summed over all ranks; the ranks that hold the same values count equal parts of them
            split = [(value, weight.replicas) for weight, value in counted if weight.placement.data_ranks > 1]
            parts = [value.float().square().sum() / replicas.size for value, replicas in split]
            square = square + all_reduce(sum(parts, start=torch.zeros((), device=device)), mesh.world)
        return square.sqrt()

    def of_gradients(self) -> Tensor:
        """Norm of the gradients; a collective."""
        return self([weight.parameter.grad for weight in self.weights])


class Timers:
    """Seconds spent in the named phases of a step; free if off.

    On a GPU, CUDA events are recorded. The host waits for the end of the step and reads them.
    """

    def __init__(self, device: torch.device, on: bool):
        self.on = on
        self._gpu = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as part of phase ``name``."""
        if not self.on:
            yield
        elif self._gpu:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            began = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - began)

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last call, as `NAME_seconds`."""
        for name, begin, end in self._events:
            # after the step: synchronizing between its phases would lengthen the measured times
            end.synchronize()
            self._add(name, begin.elapsed_time(end) / 1000)
        total = self._seconds
        self._seconds = {}
        self._events = []
        return {f"{name}_seconds": seconds for name, seconds in total.items()}

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
