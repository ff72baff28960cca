"""Fit a run to its GPUs: choose batch.micro_size=auto, and suggest changes after an out-of-memory error."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm.base.errors import ConfigError, DeviceMemoryError
from hpclm.config import RunConfig
from hpclm.distributed.context import DistributedContext
from hpclm.node import gpus, hardware
from hpclm.node.gpus import Kind
from hpclm.planning import forecast, suggest
from hpclm.planning.forecast import GIB
from hpclm.rundir import config_history

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
ON_CPU = 4096
"""Tokens of the largest micro-batch on a CPU; larger micro-batches would only take more memory."""
UNKNOWN = gpus.KINDS["H100"]
"""The kind assumed for a GPU that is not in the table, apart from its memory."""
MACHINE = replace(UNKNOWN, bf16=False)
"""The kind assumed for a machine without a GPU."""
CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory"


def gpu_kind(device: "torch.device") -> Kind | None:
    """The kind of a GPU, with its actual memory; None for a CPU."""
    import torch

    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return replace(gpus.kind_of_device(properties.name) or UNKNOWN, memory=properties.total_memory / GIB)


def with_micro_size(config: RunConfig, context: DistributedContext, device: "torch.device") -> RunConfig:
    """``config`` with a number for batch.micro_size, the same on every rank and after a resume. ConfigError on every rank if none fits."""
    return with_micro_size_for(gpu_kind(device), config, context)


def with_micro_size_for(kind: Kind | None, config: RunConfig, context: DistributedContext) -> RunConfig:
    """``with_micro_size`` for a rank with a GPU of this kind, or without one."""
    if config.batch.micro_size:
        return config
    (memory,) = context.all_reduce_max(
        -kind.memory if kind else 0.0
    )  # the negative of the smallest memory of all ranks
    smallest = replace(kind, memory=-memory) if kind and memory else None

    def chosen() -> int:
        # a phase with longer samples may need a smaller size, unless results depend on the size
        length = None if config.model.experts.balance_micro_batch else config.model.context
        kept = config_history.micro_size(Path(config.out), length)
        if kept and _divides(config, kept, context.size):
            log.info("batch.micro_size=auto: %d, as before", kept)
            return kept
        return _fastest(config, context, smallest) if smallest else _on_cpu(config, context.size)

    return _of_size(config, context.run_on_main(chosen))


def _of_size(config: RunConfig, size: int) -> RunConfig:
    return replace(config, batch=replace(config.batch, micro_size=size))


def _divides(config: RunConfig, size: int, processes: int) -> bool:
    try:
        _of_size(config, size).plan(processes)
    except ConfigError:
        return False
    return True


def _fastest(config: RunConfig, context: DistributedContext, kind: Kind) -> int:
    """The fastest size that fits GPUs of this kind, by the planner's estimate."""
    size = suggest.with_micro_size(_sized(config, context), kind).batch.micro_size
    log.info("batch.micro_size=auto: %d, for GPUs with %.0f GiB", size, kind.memory)
    return size


def _on_cpu(config: RunConfig, processes: int) -> int:
    """The largest power of two that divides the batch and has at most ON_CPU tokens."""
    size = 1
    while 2 * size * config.model.context <= ON_CPU and _divides(config, 2 * size, processes):
        size *= 2
    log.info("batch.micro_size=auto: %d, for a CPU", size)
    return size


def _sized(config: RunConfig, context: DistributedContext) -> RunConfig:
    return replace(
        config, job=replace(config.job, nodes=context.size // context.world.local_size, gpus=context.world.local_size)
    )


@contextmanager
def memory_errors_explained(config: RunConfig, context: DistributedContext) -> Iterator[None]:
    """Turn PyTorch's out-of-memory error in the block into a DeviceMemoryError that suggests changes."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError" and CPU_MESSAGE not in str(error):
            raise
        lines = [str(error).strip().splitlines()[0], *getattr(error, "__notes__", [])]
        with suppress(Exception):  # failures here must not hide the original error
            device = hardware.device(config.engine, context.world.local_rank, context.world.local_size)
            lines += _explanation(_sized(config, context), gpu_kind(device) or MACHINE)
        raise DeviceMemoryError("\n".join(lines)) from error


def _explanation(run: RunConfig, kind: Kind) -> Iterator[str]:
    expected = forecast.predict(run, kind).peak
    parts = ", ".join(f"{part.name} {_in_units(getattr(expected, part.name))}" for part in fields(expected))
    yield f"the planner expected {_in_units(needed(run, kind))}: {parts}"
    changes = [f"{settings} ({_in_units(size)})" for settings, size in smaller(run, kind).items()]
    if changes:
        yield f"settings that need less: {'; '.join(changes)}"
    yield "if these are not enough, use more GPUs; hpclm planner --suggest lists the layouts that fit"


def smaller(run: RunConfig, kind: Kind) -> dict[str, float]:
    """Changes, such as half the micro-batch, each of which saves memory by the planner's estimate -> bytes that the run then needs."""
    changes = (
        dict(batch=replace(run.batch, micro_size=max(1, run.batch.micro_size // 2))),
        dict(engine=replace(run.engine, recompute="full")),
        dict(parallel=replace(run.parallel, shard=None)),
        dict(engine=replace(run.engine, name="fsdp2", zero_stage=3)),
    )
    less = {}
    for change in changes:
        with suppress(ConfigError):  # the engine or the batch does not allow it
            other = replace(run, **change)
            size = needed(other, kind)
            if size < needed(run, kind):
                less[" ".join(suggest.options(run, other))] = size
    return less


def needed(run: RunConfig, kind: Kind) -> float:
    """The planner's estimate for the stage with the most memory, in bytes; on a machine without a GPU, tensors only."""
    peak = forecast.predict(run, kind).peak
    return peak.tensors if kind == MACHINE else peak.total


def _in_units(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / (1 << 20):.1f} MiB"
