"""Out of memory: PyTorch's message, what the planner expected, and settings that need less."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace

from hpclm.config import RunConfig
from hpclm.distributed.context import DistributedContext
from hpclm.errors import ConfigError, DeviceMemoryError
from hpclm.node.gpus import Kind
from hpclm.planning import forecast, suggest
from hpclm.planning.forecast import GIB
from hpclm.planning.memory import Memory
from hpclm.planning.micro_batch import UNKNOWN, this_gpu

MACHINE = replace(UNKNOWN, bf16=False)
"""Stands for a machine that trains without a GPU."""
ON_CPU = "DefaultCPUAllocator: can't allocate memory"


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
    run = replace(config, job=replace(config.job, nodes=context.size // context.local_size, gpus=context.local_size))
    kind = this_gpu(config, context) or MACHINE
    expected = peak(run, kind)
    parts = ", ".join(f"{part.name} {in_units(getattr(expected, part.name))}" for part in fields(expected))
    yield f"the planner expected {in_units(expected.total)}: {parts}"
    changes = [f"{settings} ({in_units(total)})" for settings, total in smaller(run, kind).items()]
    if changes:
        yield f"settings that need less: {'; '.join(changes)}"
    yield "use more GPUs if none of them is enough; hpclm planner --suggest lists the layouts that fit"


def smaller(run: RunConfig, kind: Kind) -> dict[str, float]:
    """Changes of one thing that need less memory by the planner's estimate: half the micro-batch, recomputation, sharding over all
    replicas; as settings, with the bytes that each needs."""
    engine, parallel = run.engine, run.parallel
    changes = (
        dict(batch=replace(run.batch, micro_size=max(1, run.batch.micro_size // 2))),
        dict(engine=replace(engine, recompute="full")),
        dict(parallel=replace(parallel, shard=None)),
        dict(engine=replace(engine, name="fsdp2", zero_stage=3)),
    )
    now, less = peak(run, kind).total, {}
    for change in changes:
        with suppress(ConfigError):  # the engine, or the batch, does not allow it
            other = replace(run, **change)
            if (total := peak(other, kind).total) < now:
                less[" ".join(suggest.words(run, other))] = total
    return less


def peak(run: RunConfig, kind: Kind) -> Memory:
    """The planner's estimate for the fullest stage; without what CUDA itself takes on a machine that trains without a GPU."""
    estimate = forecast.of(run, kind)
    if kind == MACHINE:
        estimate = replace(estimate, code=replace(estimate.code, fixed=0.0))
    return estimate.memory[estimate.worst]


def in_units(size: float) -> str:
    """Bytes in GiB or MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / (1 << 20):.1f} MiB"
