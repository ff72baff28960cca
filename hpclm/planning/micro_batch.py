"""batch.micro_size=auto becomes a number before anything is built, the same on every rank, and the same after a resume."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpclm import config as configs
from hpclm.config import RunConfig
from hpclm.distributed.context import DistributedContext
from hpclm.errors import ConfigError
from hpclm.node import gpus, hardware
from hpclm.node.gpus import Kind
from hpclm.planning import suggest

log = logging.getLogger(__name__)
ON_CPU = (4, 2, 1)
"""Sizes to try on a CPU, whose memory is not the limit."""
UNKNOWN = gpus.KINDS["H100"]
"""Stands for a GPU that is not in the table, with that GPU's own memory."""


def this_gpu(config: RunConfig, context: DistributedContext) -> Kind | None:
    """The GPU of this rank, with the memory that it really has; None if it trains on a CPU."""
    import torch

    device = hardware.device(config.engine, context.local_rank, context.local_size)
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return replace(gpus.named(found.name) or UNKNOWN, memory=found.total_memory / 2**30)


def resolved(
    config: RunConfig,
    context: DistributedContext,
    gpu: Callable[[RunConfig, DistributedContext], Kind | None] = this_gpu,
) -> RunConfig:
    """``config`` with a number for batch.micro_size; ConfigError on every rank if none fits."""
    if config.batch.micro_size:
        return config
    kind = gpu(config, context)
    (without,) = context.all_reduce_max(kind is None)
    if without or kind is None:
        return _of_size(config, next(size for size in ON_CPU if size == 1 or _divides(config, size, context.size)))
    (memory,) = (-value for value in context.all_reduce_max(-kind.memory))  # the smallest of all ranks
    size = context.run_on_main(lambda: _kept(config, context.size) or _chosen(config, context, kind, memory))
    return _of_size(config, size)


def _of_size(config: RunConfig, size: int) -> RunConfig:
    return replace(config, batch=replace(config.batch, micro_size=size))


def _divides(config: RunConfig, size: int, processes: int) -> bool:
    """Whether micro-batches of ``size`` divide the global batch."""
    try:
        _of_size(config, size).plan(processes)
    except ConfigError:
        return False
    return True


def _kept(config: RunConfig, processes: int) -> int | None:
    """The number that the run has used so far, if it still divides the batch."""
    path = Path(config.out) / "config.yaml"
    if not path.is_file():
        return None
    size = configs.load(path).batch.micro_size
    if not size or not _divides(config, size, processes):
        return None
    log.info("batch.micro_size=auto: %d, as before", size)
    return size


def _chosen(config: RunConfig, context: DistributedContext, kind: Kind, memory: float) -> int:
    job = replace(config.job, nodes=context.size // context.local_size, gpus=context.local_size)
    size = suggest.with_micro_size(replace(config, job=job), replace(kind, memory=memory)).batch.micro_size
    log.info("batch.micro_size=auto: %d, for GPUs with %.0f GiB", size, memory)
    return size
