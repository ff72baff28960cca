"""Ranks agree on the parts of a step that are compiled: the same parts on every rank.

A rank may be unable to compile although others can: its /tmp is full, it has no compiler, or the compiler is killed. Then no rank compiles.
Ranks agree on missing compilers before an engine is built, and on other failures after the first step. A failure after that ends the
run.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hpclm import engine as engines
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.config import EngineSettings
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine
from hpclm.model.compiled import Compilation
from hpclm.node import apex

log = logging.getLogger(__name__)


def shared_by_all(settings: EngineSettings, device: torch.device, context: DistributedContext) -> EngineSettings:
    """``settings`` without features that only some ranks have: torch.compile or apex's optimizer. A collective."""
    if context.size == 1 or device.type != "cuda":
        return settings
    optim = settings.optim
    missing = engines.missing_compiler() if settings.engine.compile is None else None
    without_apex = optim.name == "apex_adam" and not apex.has_adam(device)
    everyone = context.all_gather([missing or "", without_apex])
    lacking = [rank for rank, (what, _) in enumerate(everyone) if what]
    if 0 < len(lacking) < context.size:  # if all ranks lack it, engines.build() reports it
        first = lacking[0]
        log.warning(
            "torch.compile is off on all ranks: it needs %s, which was not found on %s",
            everyone[first][0],
            context.ranks[first],
        )
        settings = replace(settings, engine=replace(settings.engine, compile=False))
    without = [rank for rank, (_, lacks) in enumerate(everyone) if lacks]
    if 0 < len(without) < context.size:  # replicas that round updates differently would drift apart
        log.warning(
            "optim.name=apex_adam: NVIDIA apex is not usable on %s; all ranks use PyTorch's fused AdamW",
            context.ranks[without[0]],
        )
        settings = replace(settings, optim=replace(optim, name="adamw"))
    return settings


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


def failed(compilations: Sequence[Compilation]) -> dict[str, str]:
    """The parts that this process could not compile, by name, with the reason."""
    return {compilation.name: compilation.failure for compilation in compilations if compilation.failure}


def failed_on_some(compilations: Sequence[Compilation], context: DistributedContext) -> dict[str, str]:
    """The parts that only some ranks failed to compile, by name, with the first such rank and its reason. A collective."""
    everyone: list[Mapping[str, str]] = context.all_gather(failed(compilations))
    names = dict.fromkeys(name for failures in everyone for name in failures)
    ranks = {name: [rank for rank, failures in enumerate(everyone) if name in failures] for name in names}
    return {
        name: f"{context.ranks[some[0]]}: {everyone[some[0]][name]}"
        for name, some in ranks.items()
        if len(some) < context.size
    }


class AgreedCompilations:
    """The compilations of an engine on one rank, kept the same on all ranks."""

    def __init__(self, engine: Engine, context: DistributedContext):
        self.engine = engine
        self.context = context
        self.agreed = context.size == 1
        self._before: Mapping[str, str] = {}
        """This rank's failures at the time of the agreement."""

    @property
    def compilations(self) -> Sequence[Compilation]:
        """The engine's compilations; empty for user-defined engines without any."""
        compilations: Sequence[Compilation] = getattr(self.engine, "compilations", ())
        return compilations

    def failed_late(self) -> int:
        """Number of parts that this rank failed to compile after the agreement."""
        return len(failed(self.compilations).keys() - self._before.keys()) if self.agreed else 0

    def agree(self) -> None:
        """After the first step, switch off, on all ranks, each part that some rank could not compile. Only the first call is a
        collective."""
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
        self._before = failed(self.compilations)
        self.agreed = True

    def error(self) -> HpclmError:
        """The error that ends a run if a rank fails to compile a part after the agreement. A collective."""
        late = {name: why for name, why in failed(self.compilations).items() if name not in self._before}
        everyone = self.context.all_gather(next(iter(late.values()), ""))
        rank, why = next((rank, why) for rank, why in enumerate(everyone) if why)
        error = HpclmError(
            f"torch.compile failed on {self.context.ranks[rank]} after the first step, and not on all ranks: {why}\n"
            f"all ranks must run the same code: fix that machine (is its temporary folder full?), or set engine.compile=false; "
            f"the same command resumes from the last checkpoint"
        )
        error.shared = True  # all ranks raise it
        return error
