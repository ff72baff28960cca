"""Which parts of a step are compiled: the same on every rank.

A rank may be unable to compile where the others can: its /tmp is full, it has no compiler, or the compiler is killed. Then no rank
compiles. What is known before an engine is built is agreed on then, and the rest after the first step. Later it ends the run.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hpclm import engine as engines
from hpclm.config import EngineSettings
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine
from hpclm.errors import ConfigError, HpclmError
from hpclm.model.compiled import Compilation
from hpclm.node import apex

log = logging.getLogger(__name__)


def shared_by_all(settings: EngineSettings, device: torch.device, context: DistributedContext) -> EngineSettings:
    """``settings`` without what some rank cannot do while others can: compile, or update with apex. A collective."""
    if context.size == 1 or device.type != "cuda":
        return settings
    optim = settings.optim
    missing = engines.missing_compiler() if settings.engine.compile is None else None
    without_apex = optim.name == "apex_adam" and not apex.has_adam(device)
    everyone = context.all_gather([missing or "", without_apex])
    lacking = [rank for rank, (what, _) in enumerate(everyone) if what]
    if 0 < len(lacking) < context.size:  # where all lack it, engines.build() says so
        first = lacking[0]
        log.warning(
            "torch.compile is off on all ranks: it needs %s, which was not found on %s",
            everyone[first][0],
            context.ranks[first],
        )
        settings = replace(settings, engine=replace(settings.engine, compile=False))
    without = [rank for rank, (_, lacks) in enumerate(everyone) if lacks]
    if 0 < len(without) < context.size:  # replicas whose updates round otherwise would drift apart
        log.warning(
            "optim.name=apex_adam: NVIDIA apex is not usable on %s; all ranks use PyTorch's fused AdamW",
            context.ranks[without[0]],
        )
        settings = replace(settings, optim=replace(optim, name="adamw"))
    return settings


def check_types(name: str, context: DistributedContext) -> None:
    """ConfigError on every rank where engine.precision=auto would have some compute in one type and some in another. A collective."""
    names = context.all_gather(name)
    if len(set(names)) > 1:
        other = next(rank for rank, given in enumerate(names) if given != names[0])
        error = ConfigError(
            f"engine.precision=auto is {names[0]} on {context.ranks[0]} and {names[other]} on {context.ranks[other]}: "
            f"use GPUs of one kind, or set engine.precision"
        )
        error.shared = True
        raise error


def failed(compilations: Sequence[Compilation]) -> dict[str, str]:
    """What of these a process could not compile itself, by name, and why."""
    return {compilation.name: compilation.failure for compilation in compilations if compilation.failure}


def failed_on_some(compilations: Sequence[Compilation], context: DistributedContext) -> dict[str, str]:
    """What some ranks could not compile and others could, by name: the first of these ranks, and why. A collective."""
    everyone: list[Mapping[str, str]] = context.all_gather(failed(compilations))
    names = dict.fromkeys(name for failures in everyone for name in failures)
    ranks = {name: [rank for rank, failures in enumerate(everyone) if name in failures] for name in names}
    return {
        name: f"{context.ranks[some[0]]}: {everyone[some[0]][name]}"
        for name, some in ranks.items()
        if len(some) < context.size
    }


class AgreedCompilations:
    """What an engine compiles, on one rank of a run."""

    def __init__(self, engine: Engine, context: DistributedContext):
        self.engine, self.context = engine, context
        self.agreed = context.size == 1
        self._before: Mapping[str, str] = {}
        """What had failed on this rank when all agreed."""

    @property
    def compilations(self) -> Sequence[Compilation]:
        """The engine's; a user-defined one may have none."""
        compilations: Sequence[Compilation] = getattr(self.engine, "compilations", ())
        return compilations

    def failed_late(self) -> int:
        """How many parts this rank could not compile any more after all had agreed."""
        return len(failed(self.compilations).keys() - self._before.keys()) if self.agreed else 0

    def agree(self) -> None:
        """After the first step: what some rank could not compile, none does. A collective, the first time only."""
        if self.agreed:
            return
        (failures,) = self.context.all_reduce_max(len(failed(self.compilations)))
        differing = failed_on_some(self.compilations, self.context) if failures else {}
        for name, why in differing.items():
            for compilation in self.compilations:
                compilation.works = compilation.works and compilation.name != name
            text = "torch.compile failed on one rank, so %s uncompiled and slower on all (engine.compile=false silences this): %s"
            if self.context.is_main:
                log.warning(text, name, why)
        self._before, self.agreed = failed(self.compilations), True

    def error(self) -> HpclmError:
        """What ends a run in which a rank could not compile what others did after all had agreed. A collective."""
        late = {name: why for name, why in failed(self.compilations).items() if name not in self._before}
        everyone = self.context.all_gather(next(iter(late.values()), ""))
        rank, why = next((rank, why) for rank, why in enumerate(everyone) if why)
        error = HpclmError(
            f"torch.compile failed on {self.context.ranks[rank]} after the first step, and not on all ranks: {why}\n"
            f"the ranks must compute in one way: mend that machine (is its temporary folder full?), or set engine.compile=false; "
            f"the same command resumes from the last checkpoint"
        )
        error.shared = True  # every rank has come to it
        return error
