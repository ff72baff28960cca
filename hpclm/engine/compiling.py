"""What all ranks decide together before an engine is built: whether it is compiled, and types and kernels that all have."""

import logging
from dataclasses import replace

import torch

from hpclm import engine as engines
from hpclm.base.errors import ConfigError
from hpclm.config import EngineSettings
from hpclm.distributed.context import DistributedContext
from hpclm.model import compiled
from hpclm.node import apex

log = logging.getLogger(__name__)


def shared_by_all(settings: EngineSettings, device: torch.device, context: DistributedContext) -> EngineSettings:
    """``settings`` without features that only some ranks have: torch.compile or apex's optimizer. A collective."""
    if engines.compiles(settings, device)[0] or engines.compiles_attention(settings, device):
        settings = _compiled_by_all(settings, device, context)
    optim = settings.optim
    if context.size == 1 or device.type != "cuda" or optim.name != "apex_adam":
        return settings
    without = [rank for rank, has in enumerate(context.all_gather(apex.has_adam(device))) if not has]
    if 0 < len(without) < context.size:  # replicas that round updates differently would drift apart
        log.warning(
            "optim.name=apex_adam: NVIDIA apex is not usable on %s; all ranks use PyTorch's fused AdamW",
            context.ranks[without[0]],
        )
        settings = replace(settings, optim=replace(optim, name="adamw"))
    return settings


def _compiled_by_all(settings: EngineSettings, device: torch.device, context: DistributedContext) -> EngineSettings:
    """``settings`` with engine.compile=false if a rank cannot compile a small kernel. A collective."""
    problems = context.all_gather(compiled.problem(device))
    failed = [rank for rank, problem in enumerate(problems) if problem]
    if not failed:
        return settings
    if context.is_main:
        log.warning(
            "torch.compile failed on %s, so all ranks run uncompiled and slower: %s. It needs a C++ compiler and Python's headers (Debian: "
            "apt-get install g++ python3-dev); engine.compile=false silences this",
            context.ranks[failed[0]],
            problems[failed[0]],
        )
    return replace(settings, engine=replace(settings.engine, compile=False))


def check_types(name: str, context: DistributedContext) -> None:
    """ConfigError on every rank if engine.precision=auto would give ranks different compute types. A collective."""
    names = context.all_gather(name)
    if len(set(names)) > 1:
        other = next(rank for rank, given in enumerate(names) if given != names[0])
        error = ConfigError(
            f"engine.precision=auto is {names[0]} on {context.ranks[0]} and {names[other]} on {context.ranks[other]}: "
            f"use GPUs of one kind, or set engine.precision"
        )
        error.shared = True
        raise error
