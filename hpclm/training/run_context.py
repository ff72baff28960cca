"""What a rank knows of its run before anything else is opened: the settings, the other ranks, its device, the run directory."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch

from hpclm import engine as engines
from hpclm.config import RunConfig, no_effect
from hpclm.distributed.context import DistributedContext
from hpclm.engine import compiling
from hpclm.node import environment, hardware
from hpclm.optim.schedules import shape
from hpclm.parallel.mesh import Compute, GroupOptions, Mesh
from hpclm.training import messages


@dataclass(frozen=True)
class RunContext:
    """A run, as one of its ranks sees it."""

    config: RunConfig
    distributed: DistributedContext
    compute: Compute

    @property
    def out(self) -> Path:
        """The run directory."""
        return Path(self.config.out)


class MemoryPlanner(Protocol):
    """What knows how much memory runs need: hpclm.planning.fit."""

    def with_micro_size(self, config: RunConfig, context: DistributedContext, device: torch.device) -> RunConfig:
        """``config`` with a number for batch.micro_size=auto, the same on every rank; a collective."""

    def memory_errors_explained(self, config: RunConfig, context: DistributedContext) -> AbstractContextManager[None]:
        """Turns PyTorch's error in the block into one that says what to change."""


class NoPlanner:
    """For a run whose micro-batch is a number."""

    def with_micro_size(self, config: RunConfig, context: DistributedContext, device: torch.device) -> RunConfig:
        """``config``."""
        return config

    def memory_errors_explained(self, config: RunConfig, context: DistributedContext) -> AbstractContextManager[None]:
        """Lets errors pass."""
        return nullcontext()


def open_devices(config: RunConfig, context: DistributedContext) -> Compute:
    """Take a device, set the process groups up, and load the engine; ConfigError if it cannot be used."""
    device = hardware.device(config.engine, context.local_rank, context.local_size)
    context.init_process_group(device, config.cluster.timeout_minutes, Path(config.out).absolute() / "logs")
    dtype = hardware.compute_type(config.engine, device)
    compiling.check_types(hardware.NAMES[dtype], context)
    messages.device(device, dtype, hardware.set_matmul(device))
    if context.is_main:
        messages.without_effect(no_effect.by_device(config, device.type == "cuda", dtype == torch.float32))
    context.watchdog.enter("start-up")
    backend = "nccl" if device.type == "cuda" else None  # gloo's part in the group of all serves the CPUs
    options = GroupOptions(timedelta(minutes=config.cluster.timeout_minutes), backend, device)
    mesh = Mesh.build(context.rank, context.size, config.parallel, options)
    mesh = replace(mesh, nodes=len({context.ranks[rank].node for rank in mesh.dp.ranks}))
    if config.modules() or config.engine.name == "deepspeed":
        environment.for_code_that_may_compile()
    # refused, if it cannot be used, before anything is written
    engines.engine_class(config.for_engine(context.size), device)
    shape(config.optim)  # a schedule that cannot be loaded must not surface only after the warm-up
    return Compute(device, dtype, mesh)
