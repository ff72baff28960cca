"""Suggest the fastest layouts that fit, and choose batch.micro_size=auto, the fastest micro-batch that fits."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from types import SimpleNamespace
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig
from hpclm.config.rules import SPLIT
from hpclm.config.section import broken
from hpclm.config.supports import SUPPORTS
from hpclm.node.gpus import Kind
from hpclm.planning import forecast
from hpclm.planning.forecast import GIB, Forecast

VARIED = {
    "parallel": ("tensor", "pipeline", "expert", "split_experts", "shard", "schedule", "chunks"),
    "batch": ("micro_size",),
    "engine": ("name", "zero_stage", "recompute", "recompute_every"),
}
"""Settings that a suggestion may change."""
TOKENS = 32768
"""Tokens of the largest micro-batch that batch.micro_size=auto chooses; matrix products reach full speed with fewer."""


@dataclass(frozen=True)
class Suggestion:
    """A layout, its forecast, and the options that select it."""

    run: RunConfig
    forecast: Forecast
    options: tuple[str, ...]

    @property
    def speed(self) -> float:
        """Tokens per second; 0 if unknown."""
        return self.forecast.tokens_per_second or 0.0


def ranked(run: RunConfig, kind: Kind) -> list[Suggestion]:
    """The fastest variant of each combination of engine, ZeRO stage, tensor and pipeline parallelism that fits."""
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
        for sized, plan in fitting(other, kind):
            suggestion = Suggestion(sized, plan, options(run, sized))
            if sizes not in best or suggestion.speed > best[sizes].speed:
                best[sizes] = suggestion
    return sorted(best.values(), key=lambda suggestion: -suggestion.speed)


def variants(run: RunConfig) -> Iterator[RunConfig]:
    """``run`` in every layout that its settings, model and GPUs allow, with micro-batches of 1."""
    gpus = run.job.nodes * run.job.gpus
    batch = replace(run.batch, micro_size=1)
    for tensor in _divisors(run.job.gpus):
        if not _divides(run, tensor):
            continue
        for pipeline in _divisors(gpus // tensor):
            if batch.global_size * run.parallel.context % (gpus // tensor // pipeline):
                continue
            for engine, shape in _engines(run, tensor, pipeline):
                for recompute in ("none", "full"):
                    for experts in _experts(run, tensor, gpus // tensor // pipeline):
                        with suppress(ConfigError):  # the engine does not support this combination
                            parallel = replace(run.parallel, tensor=tensor, pipeline=pipeline, **shape, **experts)
                            changed = replace(run.engine, **engine, recompute=recompute, recompute_every=1)
                            yield replace(run, batch=batch, parallel=parallel, engine=changed)


def _experts(run: RunConfig, tensor: int, data: int) -> Iterator[dict[str, Any]]:
    """Settings for each division of the experts over ``data`` data-parallel ranks, with and without a split over tensor parallelism."""
    if not run.model.experts.count:
        yield {}
        return
    for expert, split in product(
        _divisors(gcd(data, run.model.experts.count)), (True, False) if tensor > 1 else (True,)
    ):
        yield dict(expert=expert, split_experts=split)


def _divides(run: RunConfig, tensor: int) -> bool:
    """Whether the model without its experts can be divided over ``tensor`` processes; experts can stay whole."""
    parallel = SimpleNamespace(tensor=tensor, context=run.parallel.context, expert=1, split_experts=False)
    return not list(broken(SimpleNamespace(model=run.model, parallel=parallel), SPLIT))


def _engines(run: RunConfig, tensor: int, pipeline: int) -> Iterator[tuple[dict, dict]]:
    """Settings of each engine with each of its ZeRO stages, and of the layout. With a pipeline, the layouts are its schedules.
    Otherwise they vary parallel.shard: null, its value in ``run``, and with several nodes the GPUs of a node."""
    shards = {run.parallel.shard or 1, run.job.gpus // tensor if run.job.nodes > 1 else 1} - {1}
    for name, can in SUPPORTS.items():
        for stage in can.stages(pipeline):
            engine = dict(name=name, zero_stage=stage)
            if pipeline == 1:
                for shard in (None, *sorted(shards)) if stage in can.hybrid else (None,):
                    yield engine, dict(shard=shard, partition="parameters", schedule="1f1b", chunks=1)
                continue
            for schedule in can.schedules:
                yield engine, dict(shard=None, schedule=schedule, chunks=2 if schedule == "interleaved" else 1)


def fitting(run: RunConfig, kind: Kind) -> Iterator[tuple[RunConfig, Forecast]]:
    """``run`` with 1, 2, 4, ... times its micro-batch, while the micro-batch divides the batch and fits."""
    plan = forecast.predict(run, kind)
    while plan.room == "fits":
        layout = plan.layout
        with suppress(ConfigError):  # a step during the ramp-up cannot be divided
            sized = replace(run, batch=replace(run.batch, micro_size=layout.micro_size))
            sized.plan(run.job.nodes * run.job.gpus)
            yield sized, plan
        if layout.accumulation % 2:
            return
        layout = replace(layout, micro_size=layout.micro_size * 2, accumulation=layout.accumulation // 2)
        plan = replace(plan, layout=layout)


def options(run: RunConfig, other: RunConfig) -> tuple[str, ...]:
    """The settings of ``other`` that differ from those of ``run``, as key=value."""
    changed = []
    for section, names in VARIED.items():
        for name in names:
            value = getattr(getattr(other, section), name)
            if value != getattr(getattr(run, section), name):
                changed.append(f"{section}.{name}={'null' if value is None else value}")
    return tuple(changed)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def with_micro_size(run: RunConfig, kind: Kind) -> RunConfig:
    """``run`` with a number for batch.micro_size=auto, on job.nodes x job.gpus GPUs; ConfigError if no size fits."""
    if run.batch.micro_size:
        return run
    smallest = replace(run, batch=replace(run.batch, micro_size=1))
    sizes = [
        (plan.tokens_per_second or 0.0, plan.layout.micro_size, sized)
        for sized, plan in fitting(smallest, kind)
        if plan.layout.micro_size == 1 or plan.layout.micro_size * run.model.context <= TOKENS
    ]
    if sizes:
        return max(sizes, key=lambda row: row[:2])[2]
    raise ConfigError(
        f"batch.micro_size=auto: even with batch.micro_size=1 this layout needs {forecast.predict(smallest, kind).peak.total / GIB:.0f} "
        f"GiB of each of {run.job.nodes} x {run.job.gpus} GPUs, which have {kind.memory:.0f}; use more GPUs, another engine "
        f"(engine.name=fsdp2), parallel.tensor or engine.recompute=full: hpclm planner --suggest lists what fits"
    )
