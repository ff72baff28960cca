"""A whole optimizer step on a GPU that is not there: every operation, what it costs and where it comes from.

The engine of the settings is built on PyTorch's meta device and runs real steps, with process groups without peers.
"""

import gc
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from hpclm.config import RunConfig
from hpclm.data.batches import Batch
from hpclm.errors import ConfigError
from hpclm.parallel.mesh import Mesh
from hpclm.parallel.step_vector import StepVector
from hpclm.planning import held, pretend
from hpclm.planning.building import built
from hpclm.planning.record import Event, Operation, Recorder

TRACED = 3
"""Micro-batches that are traced without a pipeline: the first, one that stands for all in the middle, and the last."""
AGREED = 12
"""Numbers that ranks agree on beside a step's results: signals, requests, time."""
DTYPES = {"bf16": torch.bfloat16, "auto": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Trace:
    """One optimizer step of one rank."""

    run: RunConfig
    rank: int
    world: int
    micro_batches: int
    """In a step."""
    operations: tuple[tuple[Operation, int], ...]
    """In order, each with how often it happens in a step."""
    waits: tuple[tuple[Event, int], ...]
    seeds: tuple[tuple[Event, int], ...]
    memory: Mapping[str, int]
    """Bytes of the parts of hpclm.planning.held at the step's fullest moment."""
    parameters: int
    """Of this rank's part of the model."""
    updated: int
    """Of those, how many this rank's optimizer updates."""

    @property
    def tokens(self) -> int:
        """Tokens of this replica in a step."""
        return self.micro_batches * self.run.batch.micro_size * self.run.model.context

    @property
    def collectives(self) -> list[dict[str, Any]]:
        """Collectives of a step by kind, axis, size of the group and place of the tensors, with their number and bytes."""
        found: dict[tuple[str, str, int, bool], list[int]] = defaultdict(lambda: [0, 0])
        for one, count in self.operations:
            if one.kind == "collective":
                row = found[one.name, one.group, one.group_size, one.on_host]
                row[0] += count
                row[1] += one.cost.read * count
        names = ("kind", "group", "size", "on_host", "count", "bytes")
        return [dict(zip(names, (*key, *row), strict=True)) for key, row in found.items()]

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that this rank's GPU sends in a step along each axis, if collectives are rings. pipeline: what is sent to neighbours,
        and summed with them; data: to replicas, replicate: to those of them that hold the same shard."""
        found = dict.fromkeys(("tensor", "pipeline", "data", "replicate"), 0.0)
        for row in self.collectives:
            group = "data" if row["group"] == "shard" else row["group"]
            axis = group if group in found else "pipeline"
            if not row["on_host"]:
                ring = (row["size"] - 1) / row["size"]
                times = {"allreduce": 2 * ring, "allgather": ring, "reduce_scatter": ring, "reduce": ring, "recv": 0.0}
                found[axis] += row["bytes"] * times.get(row["kind"], 1.0)
        return found


def of(run: RunConfig, rank: int = 0) -> Trace:
    """Trace the second optimizer step of a rank of job.nodes x job.gpus; ConfigError if the engine cannot be traced."""
    world = run.job.nodes * run.job.gpus
    if not 0 <= rank < world:
        raise ConfigError(f"--rank={rank} must be at least 0 and less than job.nodes x job.gpus = {world}")
    plan = run.plan(world)
    if run.engine.name == "deepspeed" and rank * run.parallel.pipeline // world > 0:
        raise ConfigError(
            f"rank {rank} is in a later stage of engine.name=deepspeed's pipeline, which learns from its neighbor what it will "
            f"receive, and cannot be traced; trace ranks 0 to {world // run.parallel.pipeline - 1}, or engine.name=pipelining"
        )
    if run.engine.offload != "none" or run.engine.offload_activations:
        raise ConfigError("a step with engine.offload or engine.offload_activations cannot be traced; leave them out")
    count = plan.accumulation(run.batch.rampup[2] + 1 if run.batch.rampup else 0)
    traced = count if run.parallel.pipeline > 1 else min(count, TRACED)
    run = replace(run, batch=replace(run.batch, global_size=run.batch.micro_size * plan.data * traced, rampup=None))
    recorder = Recorder()
    with pretend.ranks(rank, world), pretend.gpu(recorder), recorder.held.watched(), recorder:
        mesh = Mesh.build(rank, world, run.parallel)
        mesh = replace(mesh, nodes=min(run.job.nodes, mesh.dp.size))
        recorder.groups = _groups(mesh)
        engine = built(run, mesh, pretend.CUDA, DTYPES[run.engine.precision])
        agreement, batches = StepVector(mesh.world, pretend.CUDA), [_batch(run) for _ in range(traced)]
        # allocates the optimizer's state
        engine.train_step(batches if run.parallel.pipeline > 1 else batches[:1], 1e-4, 0)
        gc.collect()
        recorder.clear()
        _name(engine, recorder.held)
        result = engine.train_step(batches, 1e-4, 1, recorder.next_micro_batch)
        agreement.start([*[0.0] * AGREED, *result.values()]).read()
        memory = recorder.held.fullest()
        parameters = sum(prod(placement.local(mesh.tp)) for placement in engine.model.placements.values())
    repeats = count - traced + 1 if traced == TRACED else 1

    def counted(found: Sequence[Any]) -> tuple[tuple[Any, int], ...]:
        return tuple((one, repeats if one.micro_batch == 1 and traced == TRACED else 1) for one in found)

    return Trace(
        run,
        rank,
        world,
        count,
        counted(recorder.operations),
        counted(recorder.waits),
        counted(recorder.seeds),
        memory,
        parameters,
        recorder.held.updated,
    )


def _name(engine: Any, found: held.Held) -> None:
    """Tell weights of the model and their gradients from activations."""
    for weight in engine.model.parameters():
        found.call(held.WEIGHTS, [weight])
        weight.register_post_accumulate_grad_hook(lambda w: found.call(held.GRADIENTS, [w.grad]))


def _batch(run: RunConfig) -> Batch:
    """One micro-batch as the data loader makes it."""
    shape, data = (run.batch.micro_size, run.model.context), run.data
    ids = torch.zeros(shape, dtype=torch.int64, device=pretend.CUDA)
    mask = ids.bool() if data.eod_mask_loss else None
    positions = ids.clone() if data.reset_position_ids else None
    documents = ids.clone() if data.reset_attention_mask else None
    return Batch(ids, ids.clone(), mask, positions, documents)


def _groups(mesh: Mesh) -> dict[tuple[int, ...], str]:
    """The mesh's axes by their ranks; the most specific name of equal ones."""
    axes = {"all ranks": mesh.world, "model": mesh.model, "pipeline": mesh.pp, "shard": mesh.shard}
    axes |= {"replicate": mesh.replicate, "data": mesh.dp, "tensor": mesh.tp}
    return {axis.ranks: name for name, axis in axes.items() if axis.size > 1}
