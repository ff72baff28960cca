"""Simulate one optimizer step of any rank with the engine's code on a fake GPU, for its memory, communication and waits."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.base.registry import lookup
from hpclm.config import RunConfig
from hpclm.config.engine import ENGINES
from hpclm.config.supports import SUPPORTS, with_feature
from hpclm.engine import CHECK, unavailable
from hpclm.parallel.mesh import Compute, Mesh
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.planning.fake_gpu import CUDA, Collective, fake_gpu, peak_memory

SHORT = 3
"""Micro-batches to run without a pipeline: the first, one that represents all in the middle, and the last."""
DTYPES = {"bf16": torch.bfloat16, "auto": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PARTS = {
    "weights": ("Parameter", "Buffer"),
    "gradients": ("Gradient",),
    "optimizer": ("Optstate", "Other"),
    "activations": ("Activation", "Temp"),
}
"""Part of a report -> its names in PyTorch's MemTracker. Weights include gathered and cast ones; the optimizer's
state includes the average of the weights; activations include the rest."""


@dataclass(frozen=True)
class CollectiveTotal:
    """Collectives of one kind in one group in a step."""

    kind: str
    group: str
    """Name of the mesh axis."""
    size: int
    """Ranks in the group."""
    count: int
    bytes: int


@dataclass(frozen=True)
class Simulation:
    """One optimizer step of one rank."""

    run: RunConfig
    rank: int
    world: int
    micro_batches: int
    parameters: int
    """Parameters of this rank's part of the model."""
    updated: int
    """Number of parameters that this rank's optimizer updates."""
    memory: Mapping[str, int]
    """Bytes of each part at the memory peak of the step, uncompiled."""
    collectives: tuple[CollectiveTotal, ...]
    waits: int
    """Number of times the host waits for the device in the simulated micro-batches, without the wait for the result."""


def simulate(run: RunConfig, rank: int = 0) -> Simulation:
    """Simulate the second optimizer step of a rank of job.nodes x job.gpus; ConfigError if the engine cannot be simulated."""
    world = run.job.nodes * run.job.gpus
    can = SUPPORTS.get(run.engine.name)
    if can is None or not can.simulated or run.engine.offload_activations:
        raise ConfigError(
            f"a rank of engine.name={run.engine.name} cannot be simulated with these settings; simulations need one of the engines "
            f"{with_feature(lambda can: can.simulated)}, without engine.offload_activations. hpclm planner estimates memory and speed"
        )
    if run.parallel.schedule == "zero_bubble":  # PyTorch's memory tracker does not support backward passes in two parts
        raise ConfigError("a rank cannot be simulated with parallel.schedule=zero_bubble; simulate interleaved instead")
    micro_batches = run.plan(world).accumulation(run.batch.rampup[2] + 1 if run.batch.rampup else 0)
    count = micro_batches if run.parallel.pipeline > 1 else min(micro_batches, SHORT)
    small = shortened(run, count)
    with fake_gpu(rank, world) as counter:
        mesh = Mesh.build(rank, world, run.parallel)
        mesh = replace(mesh, nodes=min(run.job.nodes, mesh.dp.size))
        engine = build_engine(small, mesh)
        batches = [micro_batch(run).part(mesh.cp) for _ in range(count)]
        seen: list[tuple[Counter[Collective], Counter[Collective]]] = []
        # allocates the optimizer's state
        engine.train_step(batches if run.parallel.pipeline > 1 else batches[:1], 1e-4, 0)
        counter.restart()

        def between(done: int) -> None:
            seen.append((counter.calls.copy(), counter.bytes.copy()))

        averages = engine.average.averages.values() if engine.average else ()
        memory = peak_memory(
            engine.model, engine.optimizer, averages, lambda: engine.train_step(batches, 1e-4, 1, between)
        )
        updated = sum(weight.numel() for group in engine.optimizer.param_groups for weight in group["params"])
        placements = engine.model.placements
        of_experts = mesh.of_weights(run.parallel.expert)
        parameters = sum(prod(placements[name].local(mesh.tp)) for name, _ in engine.model.weights())
    calls = counter.calls
    sizes = counter.bytes
    if count == SHORT < micro_batches and run.parallel.pipeline == 1:
        for total, before, after in ((calls, seen[0][0], seen[1][0]), (sizes, seen[0][1], seen[1][1])):
            for key in after:
                total[key] += (after[key] - before[key]) * (micro_batches - SHORT)
    return Simulation(
        run,
        rank,
        world,
        micro_batches,
        parameters,
        updated,
        {part: sum(memory[name] for name in names) for part, names in PARTS.items()},
        tuple(_collectives(calls, sizes, mesh, of_experts)),
        counter.waits,
    )


def shortened(run: RunConfig, micro_batches: int) -> RunConfig:
    """``run`` with steps of this many micro-batches, uncompiled."""
    replicas = run.job.nodes * run.job.gpus // run.parallel.replica
    batch = replace(run.batch, global_size=run.batch.micro_size * replicas * micro_batches, rampup=None)
    return replace(run, batch=batch, engine=replace(run.engine, compile=False))


def build_engine(run: RunConfig, mesh: Mesh) -> Any:
    """The run's engine on the fake GPU; ConfigError if the installed PyTorch cannot run it. The machine is not checked."""
    if reason := unavailable(run.engine.name):
        raise ConfigError(reason)
    return lookup("engine", run.engine.name, ENGINES, CHECK)(
        run.for_engine(mesh.world.size), Compute(CUDA, DTYPES[run.engine.precision], mesh)
    )


def micro_batch(run: RunConfig) -> MicroBatch:
    """One micro-batch of zeros, with the tensors that the run's data loader returns."""
    ids = torch.zeros(run.batch.micro_size, run.model.context, dtype=torch.int64, device=CUDA)
    data = run.data
    return MicroBatch(
        ids,
        ids.clone(),
        ids.bool() if data.eod_mask_loss else None,
        ids.clone() if data.reset_position_ids else None,
        ids.clone() if data.reset_attention_mask else None,
    )


def _collectives(
    calls: Counter[Collective], sizes: Counter[Collective], mesh: Mesh, of_experts: Mesh
) -> list[CollectiveTotal]:
    """The totals of each kind of collective per group. A group has the name of its mesh axis, the most specific if several axes match.
    ``of_experts``: the mesh for experts."""
    axes = {
        "expert data": of_experts.dp,
        "expert shard": of_experts.shard,
        "expert replicate": of_experts.replicate,
        "all ranks": mesh.world,
        "model": mesh.model,
        "shard x tensor": mesh.holders,
        "pipeline": mesh.pp,
        "shard": mesh.shard,
    }
    axes |= {"replicate": mesh.replicate, "data": mesh.dp, "context": mesh.cp, "tensor": mesh.tp}
    names = {axis.ranks: name for name, axis in axes.items() if axis.size > 1}

    def name(kind: str, ranks: tuple[int, ...]) -> str:
        of_rows = kind == "alltoall" and ranks == mesh.ep.ranks
        return "expert" if of_rows else names.get(ranks, f"{len(ranks)} ranks")

    return [
        CollectiveTotal(kind, name(kind, ranks), len(ranks), count, sizes[kind, ranks])
        for (kind, ranks), count in calls.items()
    ]
