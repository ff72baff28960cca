"""Out of memory: PyTorch's message, what the planner expected, and the smallest changes of the settings that should fit."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from typing import Any

from hpclm.config import RunConfig
from hpclm.config.supports import SUPPORTS
from hpclm.distributed.context import DistributedContext
from hpclm.errors import ConfigError, DeviceMemoryError
from hpclm.node import processes
from hpclm.node.gpus import Kind
from hpclm.planning import forecast, suggest
from hpclm.planning.forecast import GIB, Forecast
from hpclm.planning.micro_batch import UNKNOWN, this_gpu

MACHINE = replace(UNKNOWN, bf16=False)
"""Stands for a machine that trains without a GPU, with its own memory."""
ON_CPU = "DefaultCPUAllocator: can't allocate memory"
SHOWN = 3  # suggestions


@contextmanager
def explained(config: RunConfig, context: DistributedContext) -> Iterator[None]:
    """Turn PyTorch's error in the block into a DeviceMemoryError that says what to change."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError" and ON_CPU not in str(error):
            raise
        lines = [str(error).strip().splitlines()[0]]
        with suppress(Exception):  # whatever fails here must not hide the error itself
            lines += describe(config, context)
        raise DeviceMemoryError("\n".join(lines)) from error


def describe(config: RunConfig, context: DistributedContext) -> Iterator[str]:
    """The lines that follow the error."""
    share = processes.machine_memory() / context.local_size / GIB
    kind = this_gpu(config, context) or replace(MACHINE, memory=share)
    run = replace(config, job=replace(config.job, nodes=context.size // context.local_size, gpus=context.local_size))
    expected = _forecast(run, kind)
    worst = expected.memory[expected.worst]
    parts = {part.name: getattr(worst, part.name) for part in fields(worst)}
    yield f"the planner expected {_gib(worst.total)}: {_listed(parts)}"
    changes = [" ".join(each.words) for each in fitting(run, kind)]
    if changes:
        yield f"settings that should fit: {'; or '.join(changes)}"
    else:
        yield "no smaller micro-batch, recomputation or ZeRO stage would fit: use more GPUs; hpclm planner --suggest lists layouts"


def fitting(run: RunConfig, kind: Kind) -> list[suggest.Suggestion]:
    """The smallest changes to ``run`` that fit by the planner's estimate and need less than it, each with the largest
    micro-batch."""
    now, fit = _total(_forecast(run, kind)), []
    for sizes in changes(run):
        for other in sizes:
            estimate = _forecast(other, kind)
            if _total(estimate) <= kind.memory * GIB and _total(estimate) < now:
                fit.append(suggest.Suggestion(other, estimate, suggest.words(run, other)))
                break
    fewest = min((_effort(each) for each in fit), default=0)
    return [each for each in fit if _effort(each) == fewest][:SHOWN]


def _effort(suggestion: suggest.Suggestion) -> int:
    """How many things it changes: the micro-batch, recomputation, sharding."""
    return len({word.partition("=")[0].replace("engine.name", "engine.zero_stage") for word in suggestion.words})


def changes(run: RunConfig) -> Iterator[list[RunConfig]]:
    """``run`` with other recomputation and sharding, or neither: each with its micro-batch and all smaller ones."""
    size = run.batch.micro_size or 1
    order = ["none", "selective", "full"]
    recomputes = [run.engine.recompute, *order[order.index(run.engine.recompute) + 1 :]]
    for engine, parallel in (({}, {}), *_sharded(run)):
        for recompute in recomputes:
            changed = []
            for micro_size in [size >> shift for shift in range(size.bit_length())]:
                with suppress(ConfigError):
                    other = replace(
                        run,
                        engine=replace(run.engine, **{"recompute": recompute, **engine}),
                        parallel=replace(run.parallel, **parallel),
                        batch=replace(run.batch, micro_size=micro_size),
                    )
                    other.plan(run.job.nodes * run.job.gpus)
                    changed.append(other)
            yield changed


def _sharded(run: RunConfig) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Sharding over all replicas, higher ZeRO stages of the engine, and fsdp2: changes of engine.* and parallel.*."""
    own, pipeline = SUPPORTS.get(run.engine.name), run.parallel.pipeline > 1
    if run.parallel.shard:
        yield {}, {"shard": None}
    if own:
        stages = own.pipeline_stages if pipeline else own.zero_stages
        yield from (({"zero_stage": stage}, {}) for stage in sorted(stages) if stage > (run.engine.zero_stage or 0))
    if run.engine.name != "fsdp2" and not pipeline:
        yield {"name": "fsdp2", "zero_stage": 3}, {}


def _forecast(run: RunConfig, kind: Kind) -> Forecast:
    """The planner's estimate; without what CUDA itself takes on a machine that trains without a GPU."""
    estimate = forecast.of(run, kind)
    if kind != replace(MACHINE, memory=kind.memory):
        return estimate
    return replace(estimate, code=replace(estimate.code, fixed=0.0))


def _total(estimate: Forecast) -> float:
    return estimate.memory[estimate.worst].total


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / (1 << 20):.1f} MiB"
