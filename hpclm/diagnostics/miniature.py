"""A miniature of a run: two blocks of its width, trained for two steps on random tokens, to compare two ways to compute.

The miniature computes like the run, or plainly: eager, with plain attention, on one replica. The updates of a run can be replayed from the same
gradients with the same optimizer, in plain PyTorch or as in the run. An optimizer's row in hpclm.config.optimizers describes it and its
state; nothing here depends on a particular one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpclm import engine as engines
from hpclm.base.errors import ConfigError
from hpclm.config import EngineConfig, EngineSettings, ModelConfig, OptimConfig, ParallelConfig
from hpclm.config.optimizers import OPTIMIZERS, row
from hpclm.config.plan import Plan
from hpclm.config.rules import SPLIT
from hpclm.config.section import broken
from hpclm.diagnostics.samples import (
    EPS,
    Samples,
    TensorSample,
    sample,
    sample_of,
    update_samples,
    weight_samples,
)
from hpclm.engine.base import BaseEngine, optimizer_for
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.model import count
from hpclm.model.expert_mlp import Experts
from hpclm.model.layers import ColumnLinear, RowLinear
from hpclm.model.stack import Stages
from hpclm.optim.adamw import update
from hpclm.optim.optimizers import kind_of
from hpclm.parallel.collectives import all_reduce
from hpclm.parallel.mesh import SINGLE, Compute
from hpclm.parallel.micro_batch import MicroBatch

BLOCKS = 2
LR = 1e-3
CLIP = 0.01  # less than any miniature's gradient norm, so that gradients are clipped
# for gradients of norm 1: with the usual eps, a tiny gradient's rounding error could reverse a whole update
OPTIMIZER_EPS = 1e-4
LOSS_SCALE = 256.0  # small enough that fp16 does not overflow
MAX_TOKENS = 1 << 17  # maximum number of tokens in a step for the plain way
MIN_CONTEXT = 256  # tokens
MEMORY_FRACTION = {"cuda": 0.4, "cpu": 0.1}
"""Fraction of the memory that the plain way may use."""
KERNELS = ("fused", "foreach")
"""Entries of a parameter group, as in PyTorch's optimizers, that choose a kernel; without them, updates are plain products and sums."""


@dataclass(frozen=True)
class Measured:
    """This process's part of the results of two steps."""

    first: Samples
    """First step: loss, gradient norm, initial weights, and the gradients that the update applied."""
    second: Samples
    """Second step: loss and gradient norm."""
    outcomes: Samples
    """Weights and optimizer state after the updates; empty for plain steps."""
    weights: Sequence[ShardedParameter] = ()
    """Copies of the weights before the first update; empty for plain steps."""
    gradients: Sequence[Mapping[str, Tensor]] = ()
    """For each update, the flattened gradients by weight name, scaled and clipped as the optimizer applied them."""
    routed: int = 0
    """Tokens that all experts together received in the first step."""


@dataclass(frozen=True)
class MiniatureRun:
    """The miniature of a run, on one rank."""

    settings: EngineSettings
    compute: Compute
    rows: Tensor
    """[replicas with different data, micro-batches, B, T + 1] ids."""
    restarts: tuple[bool, bool]
    """Whether samples have several documents: for attention, and for positions."""

    @classmethod
    def of(
        cls, settings: EngineSettings, compute: Compute, memory: float, restarts: tuple[bool, bool]
    ) -> "MiniatureRun":
        """The miniature of a run with these settings, on devices with ``memory`` bytes."""
        mesh = compute.mesh
        parallel = settings.parallel
        optim = settings.optim
        # the tolerance of a user's optimizer is unknown; hpclm selftest compares its updates
        if optim.name not in OPTIMIZERS:
            optim = replace(optim, name=OptimConfig.name, arguments={})
        model = settings.model
        # one block of each kind
        firsts = [model.blocks.index(layer) for layer in dict.fromkeys(model.blocks)]
        layers = max(BLOCKS, parallel.pipeline * parallel.chunks, len(firsts))
        if settings.engine.fp8:  # not in the first and the last block
            layers = max(layers, len(firsts) + 2)
        model = model.replaced({"layers": layers, "attention.dropout": 0.0, "freeze": [], **model.patterns(firsts)})
        # so that attention scores differ by about 1; otherwise a narrow model's attention would only average
        model = replace(model, init_std=max(model.init_std, model.hidden**-0.5))
        micro_batches = 2 * parallel.pipeline
        room = MEMORY_FRACTION[compute.device.type] * memory
        size = settings.plan.micro_size
        length = model.context
        while size > 1 and (size * length * micro_batches > MAX_TOKENS or _bytes(settings, model, size, length) > room):
            size //= 2
        divisible = 4 * parallel.tensor * parallel.context
        while length % divisible == 0 and length > MIN_CONTEXT and _bytes(settings, model, size, length) > room:
            length //= 2
        # the plain way has all experts in one replica
        while _bytes(settings, model, size, length) > room:
            fewer = _half_the_experts(model, parallel)
            if fewer is None:
                break
            model = fewer
        window = model.attention.window and max(1, min(model.attention.window, length // 2))
        model = model.replaced({"context": length, "attention.window": window})
        max_replicas = max(1, MAX_TOKENS // (length * micro_batches * size))
        others = max(n for n in range(1, mesh.replicas + 1) if mesh.replicas % n == 0 and n <= max_replicas)
        if others < mesh.replicas:  # masks differ between replicas
            model = replace(model, dropout=0.0)
        clip = min(optim.clip, CLIP)
        eps: dict[str, Any] = {}
        if "eps" in kind_of(optim).settings:
            eps["eps"] = OPTIMIZER_EPS * (clip or 1.0)
        draw = torch.Generator().manual_seed(settings.seed)
        rows = torch.randint(model.vocab_size, (others, micro_batches, size, length + 1), generator=draw)
        miniature = replace(
            settings,
            model=model,
            plan=Plan.divide(mesh.replicas, mesh.replicas * micro_batches * size, size),
            optim=replace(optim, clip=clip, groups=[], guard="none", qk_clip=None, **eps),
            scaler=replace(settings.scaler, initial=LOSS_SCALE, minimum=min(LOSS_SCALE, settings.scaler.minimum)),
            timers=False,
        )
        return cls(miniature, compute, rows, restarts)

    @property
    def exact(self) -> bool:
        """Whether the run computes everything in fp32."""
        return self.compute.dtype == torch.float32 and self.exact_updates

    @property
    def exact_updates(self) -> bool:
        """Whether the run's optimizer computes everything in fp32."""
        return self._optim(exact=True) == self.settings.optim

    def as_run(self, settings: EngineSettings) -> tuple[BaseEngine, list[MicroBatch]]:
        """The run's engine, and this replica's micro-batches. ``settings``: one of the ways to compute."""
        kernels = {"attention.kernel": settings.model.attention.kernel, "kernels": settings.model.kernels}
        model = self.settings.model.replaced(kernels)
        mesh = self.compute.mesh
        engine = self._engine(self.compute, engine=settings.engine, in_place=settings.in_place, model=model)
        return engine, [self._batch(rows).part(mesh.cp) for rows in self.rows[mesh.replica % len(self.rows)]]

    def plainly(self, exact: bool) -> Measured:
        """The run's steps computed plainly; every replica computes the samples of all. ``exact``: in fp32, otherwise in the run's types."""
        parallel = self.settings.parallel
        engine = self.settings.engine
        name = "pipelining" if parallel.pipeline > 1 else "native"
        rows = self.rows.transpose(0, 1).flatten(0, 1)  # in the order of micro-batches, which dropout depends on
        compute = self.compute.alone
        fp8 = engine.fp8
        if exact:
            compute = replace(compute, dtype=torch.float32)
            fp8 = None
        with sdpa_kernel([SDPBackend.MATH]):
            plain = self._engine(
                compute,
                model=self.settings.model.replaced({"attention.kernel": "math", "kernels": "torch"}),
                optim=self._optim(exact, plain=True),
                parallel=replace(parallel, shard=None, context=1, expert=1),
                engine=EngineConfig(
                    name=name, compile=False, device=engine.device, precision=engine.precision, fp8=fp8
                ),
                plan=Plan.divide(1, rows.shape[0] * rows.shape[1], rows.shape[1]),
                in_place=False,
            )
            for module in plain.model.modules():
                if isinstance(module, Experts):
                    module.loops = True
                if isinstance(module, ColumnLinear | RowLinear) and module.fp8:
                    module.fp8 = replace(module.fp8, emulated=True)
            return measured(plain, [self._batch(batch_rows) for batch_rows in rows], plain=True)

    def lost_tokens(self, run: Measured, plain: Measured) -> str:
        """How the number of tokens that the run's experts counted differs from the expected one; empty if they agree."""
        due = plain.routed * self.compute.mesh.replicas // len(self.rows)
        if run.routed == due:
            return ""
        return f"experts counted {run.routed} tokens in a step with {due} tokens for them"

    def _optim(self, exact: bool, plain: bool = False) -> OptimConfig:
        """Optimizer settings. ``exact``: in fp32; ``plain``: in plain PyTorch."""
        optim = self.settings.optim
        kind = kind_of(optim)
        exactly = replace(optim, **kind.exact) if exact else optim
        name = kind.reference or optim.name
        if not plain or name == optim.name:
            return exactly
        unread = {setting for kind in OPTIMIZERS.values() for setting in kind.settings} - {*row(name).settings}
        return replace(exactly, name=name, **{setting: getattr(OptimConfig, setting) for setting in unread})

    def _engine(self, compute: Compute, **changes: Any) -> BaseEngine:
        """An engine whose dropout draws its masks as compiled blocks on a GPU do. ``changes``: other settings."""
        engine = engines.build(replace(self.settings, **changes), compute)
        assert isinstance(engine, BaseEngine)
        for stack in engine.model.stacks if isinstance(engine.model, Stages) else [engine.model]:
            stack.seeds.by_counter = True
        return engine

    def _batch(self, rows: Tensor) -> MicroBatch:
        """[B, T + 1] ids as a micro-batch, copied to the device as in training."""
        length = rows.shape[1] - 1
        device = self.compute.device
        index = torch.arange(length).expand(len(rows), length)
        quarter = max(1, length // 4)

        def moved(values: Tensor) -> Tensor:
            if device.type == "cuda":
                values = values.contiguous().pin_memory()
            return values.to(device, non_blocking=True)

        of_attention, of_positions = self.restarts
        ids = moved(rows)
        positions = moved(index % quarter) if of_positions else None
        documents = moved(index // quarter) if of_attention else None
        return MicroBatch(ids[:, :-1], ids[:, 1:], None, positions, documents)

    def replayed(self, run: Measured, exact: bool, plain: bool, rounded: bool = False) -> Samples:
        """Weights and state after the optimizer has replayed the updates of ``run``; a collective.

        ``exact``: in fp32, otherwise in the types of the run. ``plain``: in plain PyTorch, on whole tensor-parallel slices; otherwise as
        in the run, on each process's parts. ``rounded``: with other rounding errors in the gradients, to show how the optimizer
        amplifies them.
        """
        draw = torch.Generator(self.compute.device).manual_seed(0)

        def given(weight: ShardedParameter, values: Tensor) -> Tensor:
            if plain:
                return self._whole(weight, values)
            return values.detach().clone()

        def error(values: Tensor) -> Tensor:
            return torch.rand(values.shape, generator=draw, device=values.device).sub(0.5).mul(2 * EPS).add(1.0)

        mesh = self.compute.mesh
        slices: dict[str, Any] = {}
        if plain:
            mesh = self.compute.alone.mesh
            slices = dict(begin=0, values=None, replicas=SINGLE, local_range=None, holders=None)
        weights = [
            replace(weight, parameter=nn.Parameter(given(weight, weight.parameter)), **slices) for weight in run.weights
        ]
        optimizer, state, _ = optimizer_for(weights, replace(self.settings, optim=self._optim(exact, plain)), mesh)
        for group in optimizer.param_groups:
            group["lr"] = LR * group.get("factor", 1.0)
            group.update({kernel: False for kernel in KERNELS if plain and kernel in group})
        one = torch.ones((), device=weights[0].parameter.device)
        outcomes = dict[str, TensorSample]()
        for number, gradients in enumerate(run.gradients, 1):
            before = weight_samples(state, weights, mesh)
            for held, weight in zip(run.weights, weights, strict=True):
                if held.name not in gradients:
                    weight.parameter.grad = None
                    continue
                gradient = given(held, gradients[held.name]).view_as(weight.parameter)
                if rounded:
                    gradient.mul_(error(gradient))
                weight.parameter.grad = gradient
            update(optimizer, one, 0.0, 1.0, torch.zeros_like(one))
            outcomes |= update_samples(number, before, state, weights, mesh)
        return outcomes

    def _whole(self, weight: ShardedParameter, values: Tensor) -> Tensor:
        """A new tensor: the whole tensor-parallel slice that contains this process's ``values``; for stacked experts, only this process's
        experts. A collective over the processes that hold the slice."""
        mesh = self.compute.mesh
        parts = weight.placement.data_ranks
        shape = weight.placement.local(mesh.tp)
        values = values.detach().to(self.compute.device).flatten()
        if weight.replicas.size * parts == mesh.dp.size:
            return values.clone().view(shape)
        out = torch.zeros(parts, math.prod(shape), device=self.compute.device)
        part = weight.data_rank % parts
        out[part, weight.begin : weight.begin + weight.count] = values
        return all_reduce(out, mesh.shard)[part].view(shape)


def _bytes(settings: EngineSettings, model: ModelConfig, size: int, length: int) -> float:
    """Approximate bytes of the plain way with micro-batches of ``size`` x ``length``: state, scores and other activations in fp32."""
    layers = model.layers
    stages = settings.parallel.pipeline
    activations = size * layers * (12 * model.attention.heads * length**2 + 100 * length * model.hidden) / stages
    return (16 * count.parameters(model) + activations) / settings.parallel.tensor


def _half_the_experts(model: ModelConfig, parallel: ParallelConfig) -> ModelConfig | None:
    """The model with half as many experts; None if that is not possible."""
    if model.experts.count % 2 or model.experts.count < 4:
        return None
    try:
        fewer = model.replaced({"experts.count": model.experts.count // 2})
    except ConfigError:  # the router would choose more experts than exist
        return None
    if [*broken(SimpleNamespace(model=fewer, parallel=parallel), SPLIT)]:
        return None
    return fewer


def measured(engine: BaseEngine, batches: list[MicroBatch], plain: bool = False) -> Measured:
    """Two steps of a fresh engine. ``plain``: reference steps, without a replay of their updates."""
    state = engine.state
    mesh = engine.mesh
    weights = engine.weights
    before = weight_samples(state, weights, mesh)
    initial = {f"initial {name}": values for name, values in before.items()}
    kept = [] if plain else [*_copies(engine)]
    outcomes = dict[str, TensorSample]()
    scalars = list[dict[str, TensorSample]]()
    gradients = list[dict[str, Any]]()
    routed = 0

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        scale = getattr(
            optimizer, "grad_scale", 1.0
        )  # the attribute is torch.amp's; without it, a library scales gradients itself
        for weight in weights:
            gradient = state.gradient(weight)
            if gradient is not None:
                held = state.local_part(weight)
                applied = gradient.detach().flatten()[: held.count] / scale
                gradients[-1][weight.name] = sample_of(held, applied, mesh) if plain else applied

    hook = engine.optimizer.register_step_pre_hook(record)
    for number in (1, 2):
        gradients.append({})
        result = engine.train_step(batches, LR, number - 1)
        numbers = {what: torch.tensor(result.numbers[what], dtype=torch.float64) for what in ("loss", "grad_norm")}
        if number == 1 and engine.router_state:
            routers = engine.router_state
            initial |= {f"load of {name}": sample(routers.load[row]) for name, row in routers.rows.items()}
            routed = int(routers.counts.sum())
        scalars.append({f"{what} of step {number}": sample(value) for what, value in numbers.items()})
        if not plain:
            outcomes |= update_samples(number, before, state, weights, mesh)
            before = weight_samples(state, weights, mesh)
    hook.remove()
    first = gradients[0]
    applied = (
        first if plain else {held.name: sample_of(held, first[held.name], mesh) for held in kept if held.name in first}
    )
    first_step = scalars[0] | initial | {f"gradient of {name}": values for name, values in applied.items()}
    return Measured(first_step, scalars[1], outcomes, kept, [] if plain else gradients, routed)


def _copies(engine: BaseEngine) -> Iterator[ShardedParameter]:
    """This process's parts of the weights, with copies of their values, without padding."""
    for weight in engine.weights:
        held = engine.state.local_part(weight)
        values = engine.state.values(weight)
        if held.values is not None:
            values = values.flatten()[: held.count]
        yield replace(held, parameter=nn.Parameter(values.clone()), values=None)
