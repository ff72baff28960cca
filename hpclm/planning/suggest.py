"""Suggest layouts that fit, fastest first; batch.micro_size=auto, the fastest micro-batch that fits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpclm.config import RunConfig
from hpclm.config.supports import SUPPORTS
from hpclm.errors import ConfigError
from hpclm.node.gpus import Kind
from hpclm.planning import forecast
from hpclm.planning.forecast import GIB, Forecast

VARIED = {
    "parallel": ("tensor", "pipeline", "shard", "schedule", "chunks"),
    "batch": ("micro_size",),
    "engine": ("name", "zero_stage", "recompute", "recompute_every"),
}
"""Settings that a suggestion may change."""
TOKENS = 32768
"""Tokens of the largest micro-batch of batch.micro_size=auto: matrix products are as fast as they get with fewer."""


@dataclass(frozen=True)
class Suggestion:
    """A layout, its forecast, and the options that select it."""

    run: RunConfig
    forecast: Forecast
    words: tuple[str, ...]


def ranked(run: RunConfig, kind: Kind) -> list[Suggestion]:
    """The fastest way to run each combination of engine, ZeRO stage, tensor and pipeline parallelism that fits."""
    if forecast.element(run, kind) > 2:
        raise ConfigError(
            "layouts are ranked by speed, which is not predicted in fp32; set engine.precision to bf16 or fp16"
        )
    best: dict[tuple[object, ...], Suggestion] = {}
    others = list(variants(run))
    if not others:
        raise ConfigError(
            f"no layout divides batch.global_size={run.batch.global_size} over job.nodes={run.job.nodes} x "
            f"job.gpus={run.job.gpus} GPUs; set batch.global_size to a multiple of {run.job.nodes * run.job.gpus}"
        )
    for other in others:
        sizes = other.parallel.tensor, other.parallel.pipeline, other.engine.name, other.engine.zero_stage
        for found in fitting(other, kind):
            if sizes not in best or _speed(found) > _speed(best[sizes].forecast):
                changed = replace(other, batch=replace(other.batch, micro_size=found.layout.micro_size))
                best[sizes] = Suggestion(changed, found, words(run, changed))
    return sorted(best.values(), key=lambda s: -_speed(s.forecast))


def _speed(found: Forecast) -> float:
    return found.tokens_per_second or 0.0


def variants(run: RunConfig) -> Iterator[RunConfig]:
    """``run`` in every layout that its settings, model and GPUs allow, with micro-batches of 1."""
    gpus = run.job.nodes * run.job.gpus
    batch = replace(run.batch, micro_size=1)
    for tensor in _divisors(run.job.gpus):
        if next(run.model.unsplit(tensor), None):
            continue
        for pipeline in _divisors(gpus // tensor):
            if batch.global_size % (gpus // tensor // pipeline) == 0:
                for engine, shape in _engines(pipeline, _shards(run, tensor)):
                    for recompute in ("none", "full"):
                        try:
                            parallel = replace(run.parallel, tensor=tensor, pipeline=pipeline, **shape)
                            changed = replace(run.engine, **engine, recompute=recompute, recompute_every=1)
                            yield replace(run, batch=batch, parallel=parallel, engine=changed)
                        except ConfigError:  # the engine does not support this combination
                            continue


def _shards(run: RunConfig, tensor: int) -> list[int | None]:
    """Values of parallel.shard: all replicas, those of a node if there are several nodes, and what is set."""
    node = run.job.gpus // tensor
    found = {run.parallel.shard or 1, node if run.job.nodes > 1 else 1}
    return [None, *sorted(found - {1})]


def _engines(pipeline: int, shards: list[int | None]) -> Iterator[tuple[dict, dict]]:
    """Settings of each engine, with each of its ZeRO stages and pipeline schedules; ``shards``: values of parallel.shard."""
    for name, can in SUPPORTS.items():
        for stage in (can.pipeline_stages if pipeline > 1 else can.zero_stages) if can.alone or pipeline > 1 else ():
            engine = dict(name=name, zero_stage=stage)
            if pipeline == 1:
                for shard in shards if stage in can.hybrid else (None,):
                    yield engine, dict(shard=shard, partition="parameters", schedule="1f1b", chunks=1)
                continue
            for schedule in can.schedules:
                yield engine, dict(shard=None, schedule=schedule, chunks=2 if schedule == "interleaved" else 1)


def fitting(run: RunConfig, kind: Kind) -> Iterator[Forecast]:
    """Forecasts with micro-batches of 1, 2, 4, ... times the given size, as long as they divide the batch and fit."""
    found = forecast.of(run, kind)
    while found.room == "fits":
        where = found.layout
        if _runs(run, where.micro_size):
            yield found
        if where.accumulation % 2:
            return
        where = replace(where, micro_size=where.micro_size * 2, accumulation=where.accumulation // 2)
        found = replace(found, layout=where)


def _runs(run: RunConfig, micro_size: int) -> bool:
    """Whether every step of ``run`` can be divided into micro-batches of that size."""
    try:
        other = replace(run, batch=replace(run.batch, micro_size=micro_size))
        other.plan(run.job.nodes * run.job.gpus)
    except ConfigError:
        return False
    return True


def words(run: RunConfig, other: RunConfig) -> tuple[str, ...]:
    """The settings of ``other`` that differ from those of ``run``, as key=value words."""
    return tuple(
        f"{section}.{name}={'null' if new is None else new}"
        for section, names in VARIED.items()
        for name in names
        if (new := getattr(getattr(other, section), name)) != getattr(getattr(run, section), name)
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def with_micro_size(run: RunConfig, kind: Kind) -> RunConfig:
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
