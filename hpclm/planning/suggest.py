"""Layouts that fit, fastest first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpclm.cluster.kinds import Kind
from hpclm.config import RunConfig
from hpclm.config.supports import SUPPORTS
from hpclm.errors import ConfigError
from hpclm.planning import forecast
from hpclm.planning.forecast import Forecast

VARIED = {
    "parallel": ("tensor", "pipeline", "schedule", "chunks"),
    "batch": ("micro_size",),
    "engine": ("name", "zero_stage", "recompute", "recompute_every"),
}
"""Settings that a suggestion may change."""


@dataclass(frozen=True)
class Suggestion:
    """A layout, what to expect of it, and the words that ask for it."""

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
        for found in _fitting(other, kind):
            if sizes not in best or _speed(found) > _speed(best[sizes].forecast):
                changed = replace(other, batch=replace(other.batch, micro_size=found.layout.micro_size))
                best[sizes] = Suggestion(changed, found, words(run, changed))
    return sorted(best.values(), key=lambda s: -_speed(s.forecast))


def _speed(found: Forecast) -> float:
    return found.tokens_per_second or 0.0


def variants(run: RunConfig) -> Iterator[RunConfig]:
    """``run`` in every layout that its engine's settings, its model and its GPUs allow, with the smallest micro-batches."""
    gpus = run.job.nodes * run.job.gpus
    batch = replace(run.batch, micro_size=1)
    for tensor in _divisors(run.job.gpus):
        if next(run.model.unsplit(tensor), None):
            continue
        for pipeline in _divisors(gpus // tensor):
            if batch.global_size % (gpus // tensor // pipeline) == 0:
                for engine, shape in _engines(pipeline):
                    for recompute in ("none", "full"):
                        try:
                            parallel = replace(run.parallel, tensor=tensor, pipeline=pipeline, **shape)
                            changed = replace(run.engine, **engine, recompute=recompute, recompute_every=1)
                            yield replace(run, batch=batch, parallel=parallel, engine=changed)
                        except ConfigError:  # this engine cannot do that, or not with the other settings
                            continue


def _engines(pipeline: int) -> Iterator[tuple[dict, dict]]:
    """Settings of the engine and of the pipeline: each engine, with each of its ZeRO stages and schedules."""
    for name, can in SUPPORTS.items():
        for stage in (can.pipeline_stages if pipeline > 1 else can.zero_stages) if can.alone or pipeline > 1 else ():
            engine = dict(name=name, zero_stage=stage)
            if pipeline == 1:
                yield engine, dict(partition="parameters", schedule="1f1b", chunks=1)
                continue
            for schedule in can.schedules:
                yield engine, dict(schedule=schedule, chunks=2 if schedule == "interleaved" else 1)


def _fitting(run: RunConfig, kind: Kind) -> Iterator[Forecast]:
    """``run`` with micro-batches of 1, 2, 4 and so on, as long as they divide the batch and fit."""
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
    """Whether ``run`` can do every step with micro-batches of that size."""
    try:
        other = replace(run, batch=replace(run.batch, micro_size=micro_size))
        other.plan(run.job.nodes * run.job.gpus)
    except ConfigError:
        return False
    return True


def words(run: RunConfig, other: RunConfig) -> tuple[str, ...]:
    """The settings of ``other`` that differ from those of ``run``, as one types them."""
    return tuple(
        f"{section}.{name}={new}"
        for section, names in VARIED.items()
        for name in names
        if (new := getattr(getattr(other, section), name)) != getattr(getattr(run, section), name)
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
