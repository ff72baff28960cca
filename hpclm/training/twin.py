"""A small twin of a run: two blocks of its width, trained for two steps on random tokens, so that two ways to compute can be compared.

What is compared: losses, gradient norms, initial weights, the gradients that the first update applies, and what each update makes of
the weights and of the optimizer's state.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpclm import engine as engines
from hpclm.config import EngineConfig, EngineSettings, ModelConfig, OptimConfig
from hpclm.config.optimizers import OPTIMIZERS
from hpclm.config.plan import Plan
from hpclm.engine.base import BaseEngine
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.model import count
from hpclm.model.stack import Stages
from hpclm.parallel.compute import Compute
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.training import replay
from hpclm.training.replay import Sample, Samples, Updates

BLOCKS = 2
LR = 1e-3
CLIP = 0.01  # less than the norm of any twin's gradients, so that they are clipped
EPS = 1e-4  # of the optimizer, for gradients of norm 1: with the usual one, a tiny gradient's rounding error would turn a whole update round
LOSS_SCALE = 256.0  # so that fp16 overflows in none of the steps
MAX_PLAIN_TOKENS = 1 << 17  # that the plain way may have to compute in a step
SHORTEST = 256  # tokens
ROOM = {"cuda": 0.4, "cpu": 0.1}
"""Part of the memory that the plain way may take."""


@dataclass(frozen=True)
class Twin:
    """The twin of a run, on one rank."""

    settings: EngineSettings
    compute: Compute
    rows: Tensor
    """[replicas with other data, micro-batches, B, T + 1] ids."""
    restarts: tuple[bool, bool]
    """Whether samples have several documents: for attention, and for positions."""

    @classmethod
    def of(cls, settings: EngineSettings, compute: Compute, memory: float, restarts: tuple[bool, bool]) -> "Twin":
        """The twin of a run with these settings, on devices with ``memory`` bytes."""
        mesh, parallel, optim = compute.mesh, settings.parallel, settings.optim
        stages = parallel.pipeline * parallel.chunks
        kinds = list(dict.fromkeys(settings.model.kind(layer) for layer in range(settings.model.layers)))
        layers = max(BLOCKS, stages, len(kinds))
        model = replace(settings.model, layers=layers, pattern=kinds, attention_dropout=0.0)
        # scores of attention that differ by about 1: in a narrow model they are otherwise so small that it is a mere mean
        model = replace(model, init_std=max(model.init_std, model.hidden**-0.5))
        micro_batches = 2 * parallel.pipeline
        room = ROOM[compute.device.type] * memory
        size, length = settings.plan.micro_size, model.context
        while size > 1 and (
            size * length * micro_batches > MAX_PLAIN_TOKENS or _bytes(settings, model, size, length) > room
        ):
            size //= 2
        while (
            length % (4 * parallel.tensor * parallel.context) == 0
            and length > SHORTEST
            and _bytes(settings, model, size, length) > room
        ):
            length //= 2
        window = model.window and max(1, min(model.window, length // 2))
        model = replace(model, context=length, window=window)
        most = max(1, MAX_PLAIN_TOKENS // (model.context * micro_batches * size))
        others = max(n for n in range(1, mesh.replicas + 1) if mesh.replicas % n == 0 and n <= most)
        if others < mesh.replicas:  # masks differ from replica to replica
            model = replace(model, dropout=0.0)
        clip = min(optim.clip, CLIP)
        eps: dict[str, Any] = dict(eps=EPS * (clip or 1.0)) if "eps" in OPTIMIZERS[optim.name].settings else {}
        draw = torch.Generator().manual_seed(settings.seed)
        shape = (others, micro_batches, size, model.context + 1)
        twin = replace(
            settings,
            model=model,
            plan=Plan.divide(mesh.replicas, mesh.replicas * micro_batches * size, size),
            optim=replace(optim, clip=clip, groups=[], guard="none", qk_clip=None, **eps),
            scaler=replace(settings.scaler, initial=LOSS_SCALE, minimum=min(LOSS_SCALE, settings.scaler.minimum)),
            timers=False,
        )
        return cls(twin, compute, torch.randint(model.vocab_size, shape, generator=draw), restarts)

    def as_run(self, settings: EngineSettings) -> tuple[BaseEngine, list[MicroBatch]]:
        """The run's engine, in one of the ways to compute that ``settings`` of the run stand for, and this replica's micro-batches."""
        model, way = self.settings.model, settings.model
        model = replace(model, attention=way.attention, kernels=way.kernels)
        settings = replace(self.settings, engine=settings.engine, in_place=settings.in_place, model=model)
        mesh = self.compute.mesh
        rows = self.rows[mesh.replica % len(self.rows)]
        return _built(settings, self.compute), [self._batch(each).part(mesh.cp) for each in rows]

    @property
    def exact(self) -> bool:
        """Whether the run computes all in fp32."""
        return self.compute.dtype == torch.float32 and self.exact_updates

    @property
    def exact_updates(self) -> bool:
        """Whether the run's optimizer computes all in fp32."""
        return self._optim(exact=True) == self.settings.optim

    def _optim(self, exact: bool, plain: bool = False) -> OptimConfig:
        """The settings of the optimizer; ``exact``: in fp32; ``plain``: in plain PyTorch."""
        optim = self.settings.optim
        kind = OPTIMIZERS[optim.name]
        exactly = replace(optim, **kind.exact) if exact else optim
        name = kind.reference or optim.name
        if not plain or name == optim.name:
            return exactly
        unread = {setting for kind in OPTIMIZERS.values() for setting in kind.settings} - {*OPTIMIZERS[name].settings}
        return replace(exactly, name=name, **{setting: getattr(OptimConfig, setting) for setting in unread})

    def plainly(self, exact: bool) -> "Measured":
        """The run's steps, eager, with plain attention, and all replicas' samples on each of them; ``exact``: in fp32, else in the
        types of the run."""
        settings, parallel, engine = self.settings, self.settings.parallel, self.settings.engine
        plain = EngineConfig(
            name="pipelining" if parallel.pipeline > 1 else "native",
            compile=False,
            device=engine.device,
            precision=engine.precision,
        )
        rows = self.rows.transpose(0, 1).flatten(0, 1)  # in the order in which micro-batches are counted, for dropout
        settings = replace(
            settings,
            model=replace(settings.model, attention="math", kernels="torch"),
            optim=self._optim(exact, plain=True),
            parallel=replace(parallel, shard=None, context=1),
            engine=plain,
            plan=Plan.divide(1, rows.shape[0] * rows.shape[1], rows.shape[1]),
            in_place=False,
        )
        compute = replace(self.compute.alone, dtype=torch.float32 if exact else self.compute.dtype)
        with plain_attention():
            return measured(_built(settings, compute), [self._batch(each) for each in rows], plain=True)

    def replayed(self, updates: Updates, exact: bool, plain: bool, rounded: bool = False) -> Samples:
        """What these updates of the run make of weights and state; ``exact``: in fp32, else in the types of the run; ``plain``: in plain
        PyTorch, else as in the run; ``rounded``: with other rounding errors in the gradients."""
        settings = replace(self.settings, optim=self._optim(exact, plain))
        return replay.replayed(updates, settings, self.compute, plain, rounded)

    def _batch(self, rows: Tensor) -> MicroBatch:
        """[B, T + 1] ids as a micro-batch, copied to the device as training's are."""
        length, device = rows.shape[1] - 1, self.compute.device
        index = torch.arange(length).expand(len(rows), length)
        quarter = max(1, length // 4)
        wanted = (rows, index // quarter, index % quarter)
        on_host = [each if there else None for each, there in zip(wanted, (True, *self.restarts), strict=True)]
        if device.type == "cuda":
            on_host = [each if each is None else each.contiguous().pin_memory() for each in on_host]
        moved: list[Any] = [each if each is None else each.to(device, non_blocking=True) for each in on_host]
        ids, documents, positions = moved
        return MicroBatch(ids[:, :-1], ids[:, 1:], None, positions, documents)


def _built(settings: EngineSettings, compute: Compute) -> BaseEngine:
    """An engine whose dropout, in whatever way it computes, draws what the compiled blocks of a GPU draw."""
    engine = engines.build(settings, compute)
    assert isinstance(engine, BaseEngine)
    for stack in engine.model.stacks if isinstance(engine.model, Stages) else [engine.model]:
        stack.seeds.by_counter = True
    return engine


def plain_attention() -> AbstractContextManager[None]:
    """Inside this context, attention is plain matrix products."""
    return sdpa_kernel([SDPBackend.MATH])


def _bytes(settings: EngineSettings, model: ModelConfig, size: int, length: int) -> float:
    """Bytes, about, of the plain way with micro-batches of ``size`` x ``length``: state, scores and other activations in fp32."""
    layers, stages = model.layers, settings.parallel.pipeline
    activations = size * layers * (12 * model.heads * length**2 + 100 * length * model.hidden) / stages
    return (16 * count.parameters(model) + activations) / settings.parallel.tensor


@dataclass(frozen=True)
class Measured:
    """What two steps gave."""

    scalars: Sequence[Mapping[str, float]]
    """Loss and gradient norm of each step."""
    values: Samples
    """The initial weights, and the gradients of the first update."""
    outcomes: Samples
    """What the updates made of the weights and the optimizer's state."""
    updates: Updates
    """What they were given; of plain steps, nothing."""


def measured(engine: BaseEngine, batches: list[MicroBatch], plain: bool = False) -> Measured:
    """Two steps of a fresh engine; ``plain``: those that others are compared with, whose updates are not made again."""
    state, mesh, weights = engine.state, engine.mesh, engine.weights
    before = replay.weights_of(state, weights, mesh)
    scalars, outcomes = list[dict[str, float]](), dict[str, Sample]()
    samples = {f"initial {name}": value for name, value in before.items()}
    kept = [] if plain else replay.copies(engine)

    def sampled(held: ShardedParameter, gradient: Tensor) -> Sample:
        return replay.sample(held, gradient, mesh)

    with replay.recorded(engine, sampled if plain else lambda held, gradient: gradient) as gradients:
        for number in (1, 2):
            gradients.append({})
            result = engine.train_step(batches, LR, number - 1)
            scalars.append({f"{what} of step {number}": result.numbers[what] for what in ("loss", "grad_norm")})
            if not plain:
                outcomes |= replay.outcome(number, before, state, weights, mesh)
                outcomes |= replay.of_matrices(number, state, weights)
                before = replay.weights_of(state, weights, mesh)
    first = gradients[0]
    applied = first if plain else {held.name: sampled(held, first[held.name]) for held in kept if held.name in first}
    samples |= {f"gradient of {name}": gradient for name, gradient in applied.items()}
    return Measured(scalars, samples, outcomes, Updates() if plain else Updates(kept, gradients, LR))
