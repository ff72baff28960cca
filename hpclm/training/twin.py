"""A small twin of a run: two blocks of its width, trained for two steps on random tokens, so that two ways to compute can be compared.

What is compared: losses, gradient norms, initial weights, the optimizer's state after one step (Adam's first moment is the clipped
gradient, times 1 - beta1, as is Muon's momentum) and the change of the weights.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpclm import engine as engines
from hpclm.config import EngineConfig, EngineSettings, ModelConfig, OptimConfig
from hpclm.config.plan import Plan
from hpclm.engine.base import BaseEngine
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.model import count
from hpclm.model.stack import Stages
from hpclm.optim.muon import Muon
from hpclm.parallel.mesh import SINGLE, Mesh
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.training.compute import Compute
from hpclm.training.muon_updates import WatchedExchange
from hpclm.training.updates import misupdated

BLOCKS = 2
LR = 1e-3
CLIP = 0.01  # less than the norm of any twin's gradients, so that they are clipped
EPS = 1e-4  # of Adam, for gradients of norm 1: with the usual one, a tiny gradient's rounding error would turn a whole update round
LOSS_SCALE = 256.0  # so that fp16 overflows in none of the steps
SAMPLED = 1 << 20  # values of a tensor that are compared, evenly spaced
MOST_TOKENS = 1 << 17  # that the plain way may have to compute in a step
SHORTEST = 256  # tokens
ROOM = {"cuda": 0.4, "cpu": 0.1}
"""Part of the memory that the plain way may take."""

Values = Mapping[str, tuple[int, Tensor]]
"""What -> the number of the first of its sampled values that this rank has, and these, in fp32 on the CPU."""


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
            size * length * micro_batches > MOST_TOKENS or _bytes(settings, model, size, length) > room
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
        most = max(1, MOST_TOKENS // (model.context * micro_batches * size))
        others = max(n for n in range(1, mesh.replicas + 1) if mesh.replicas % n == 0 and n <= most)
        if others < mesh.replicas:  # masks differ from replica to replica
            model = replace(model, dropout=0.0)
        clip = min(optim.clip, CLIP)
        draw = torch.Generator().manual_seed(settings.seed)
        shape = (others, micro_batches, size, model.context + 1)
        twin = replace(
            settings,
            model=model,
            plan=Plan.divide(mesh.replicas, mesh.replicas * micro_batches * size, size),
            optim=OptimConfig(
                name=optim.name,
                betas=optim.betas,
                eps=EPS * (clip or 1.0),
                weight_decay=optim.weight_decay,
                decayed=optim.decayed,
                clip=clip,
                z_loss=optim.z_loss,
                momentum=optim.momentum,
                nesterov=optim.nesterov,
                newton_schulz_steps=optim.newton_schulz_steps,
                newton_schulz_type=optim.newton_schulz_type,
                adjust=optim.adjust,
                split=optim.split,
            ),
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
        rounds = self.settings.optim.name == "muon" and self.settings.optim.newton_schulz_type != "fp32"
        return self.compute.dtype == torch.float32 and not rounds

    def plainly(self, exact: bool) -> "Measured":
        """The same steps, eager, with plain attention, and all replicas' samples on each of them; ``exact``: in fp32, else in the
        types of the run."""
        dtype, muon = torch.float32 if exact else self.compute.dtype, self.settings.optim.name == "muon"
        settings, mesh = self.settings, self.compute.mesh
        parallel, engine = settings.parallel, settings.engine
        plain = EngineConfig(
            name="pipelining" if parallel.pipeline > 1 else "native",
            compile=False,
            device=engine.device,
            precision=engine.precision,
        )
        rows = self.rows.transpose(0, 1).flatten(0, 1)  # in the order in which micro-batches are counted, for dropout
        optim = replace(settings.optim, name="muon" if muon else "adamw")
        settings = replace(
            settings,
            model=replace(settings.model, attention="math", kernels="torch"),
            optim=replace(optim, newton_schulz_type="fp32") if muon and exact else optim,
            parallel=replace(parallel, shard=None, context=1),
            engine=plain,
            plan=Plan.divide(1, rows.shape[0] * rows.shape[1], rows.shape[1]),
            in_place=False,
        )
        alone = replace(
            mesh, dp=SINGLE, cp=SINGLE, shard=SINGLE, replicate=SINGLE, holders=mesh.tp, world=mesh.model, nodes=1
        )
        with plain_attention():
            return measured(
                _built(settings, replace(self.compute, mesh=alone, dtype=dtype)), [self._batch(each) for each in rows]
            )

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
    engine = engines.build(settings, compute.mesh, compute.device, compute.dtype)
    assert isinstance(engine, BaseEngine)
    for stack in engine.model.stacks if isinstance(engine.model, Stages) else [engine.model]:
        stack.counter_dropout = True
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

    scalars: Mapping[str, float]
    values: Values
    misupdated: str
    """How the updates differ from the optimizer's, given this rank's own gradients; empty if they do not."""


def measured(engine: BaseEngine, batches: list[MicroBatch]) -> Measured:
    """Two steps of a fresh engine."""
    muon, noted = engine.optimizer if isinstance(engine.optimizer, Muon) else None, dict[str, Tensor]()
    if muon:
        watch = WatchedExchange(engine, muon, lambda weight, values: _sample(weight, values, engine.mesh)[1])
        noted = watch.state
    before = dict(_sampled(engine))
    states = [_values(before)]
    first = engine.train_step(batches, LR, 0)
    after = dict(_sampled(engine))
    states.append(_values(after) | noted)
    second = engine.train_step(batches, LR, 1)
    states.append(_values(dict(_sampled(engine))) | noted)
    shapes = {weight.name: weight.shape for weight in engine.weights}
    scalars = {
        f"{name} of step {n}": getattr(r, name) for n, r in ((1, first), (2, second)) for name in ("loss", "grad_norm")
    }
    values = {f"initial {what}": value for what, value in before.items()}
    values |= {
        f"change of {what}": (at, value - before[what][1]) for what, (at, value) in after.items() if what in before
    }
    values |= {what: value for what, value in after.items() if what not in before}
    wrong = misupdated(engine.config.optim, LR, shapes, states) or (watch.misupdated(LR, states) if muon else "")
    return Measured(scalars, values, wrong)


def _values(sampled: Values) -> dict[str, Tensor]:
    """What was sampled, without its place."""
    return {what: value for what, (_, value) in sampled.items()}


def _sampled(engine: BaseEngine) -> Iterator[tuple[str, tuple[int, Tensor]]]:
    """Samples of the weights and the optimizer's state that this rank holds."""
    for weight in engine.weights:
        held = engine.state.held(weight)
        yield weight.name, _sample(held, engine.state.values(weight), engine.mesh)
        for name in engine.state.names(weight):
            yield f"{name} of {weight.name}", _sample(held, engine.state.values(weight, name), engine.mesh)


def _sample(held: ShardedParameter, values: Tensor, mesh: Mesh) -> tuple[int, Tensor]:
    """Every n-th value of the tensor-parallel slice, those of them that this rank holds."""
    every = math.prod(held.placement.local(mesh.tp)) // SAMPLED + 1 | 1  # odd, so that it meets every column
    skip = -held.begin % every
    mine = values.detach().flatten()[: held.count][skip::every]
    return (held.begin + skip) // every, mine.to("cpu", torch.float32, copy=True)
