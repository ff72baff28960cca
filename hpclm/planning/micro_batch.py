"""batch.micro_size=auto: the fastest micro-batch that fits, by the planner's estimate."""

from dataclasses import replace

from hpclm.config import RunConfig
from hpclm.errors import ConfigError
from hpclm.node.gpus import Kind
from hpclm.planning import forecast
from hpclm.planning.forecast import GIB, Forecast
from hpclm.planning.suggest import fitting

TOKENS = 32768
"""Tokens of the largest micro-batch: matrix products are as fast as they get with fewer."""


def resolved(run: RunConfig, kind: Kind) -> RunConfig:
    """``run`` with a number for batch.micro_size=auto, on job.nodes x job.gpus GPUs; ConfigError if no size fits."""
    if run.batch.micro_size:
        return run
    smallest = replace(run, batch=replace(run.batch, micro_size=1))
    found = [one for one in fitting(smallest, kind) if one.layout.micro_size in (1, *_useful(one, run))]
    if not found:
        raise ConfigError(_refused(smallest, kind))
    best = max(found, key=lambda one: (one.tokens_per_second or 0.0, one.layout.micro_size))
    return replace(run, batch=replace(run.batch, micro_size=best.layout.micro_size))


def _useful(found: Forecast, run: RunConfig) -> tuple[int, ...]:
    """Its size of a micro-batch, unless that is larger than it needs to be."""
    return (found.layout.micro_size,) if found.layout.micro_size * run.model.context <= TOKENS else ()


def _refused(run: RunConfig, kind: Kind) -> str:
    need = forecast.of(run, kind)
    gpus = f"{run.job.nodes} x {run.job.gpus} GPUs"
    return (
        f"batch.micro_size=auto: even with batch.micro_size=1 this layout needs {need.memory[need.worst].total / GIB:.0f} GiB of "
        f"each of {gpus}, which have {kind.memory:.0f}; use more GPUs, another engine (engine.name=fsdp2), parallel.tensor or "
        f"engine.recompute=full: hpclm planner --suggest lists what fits"
    )
