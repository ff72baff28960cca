"""What each engine can do, as data: checked before the queue, without loading any engine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpclm.config.engine import EngineConfig, ParallelConfig


@dataclass(frozen=True)
class Supports:
    """What an engine can do."""

    path: str
    """Where its class is."""
    zero_stages: tuple[int, ...] = (0,)
    """Values of engine.zero_stage, without a pipeline; the first is what null means."""
    pipeline_stages: tuple[int, ...] = ()
    """Values of engine.zero_stage with a pipeline; none: it has no pipeline."""
    alone: bool = True
    """Whether it runs without a pipeline."""
    schedules: tuple[str, ...] = ()
    """Values of parallel.schedule."""
    offload: tuple[tuple[str, int], ...] = ()
    """Values of engine.offload, each with a ZeRO stage it works at."""
    options: tuple[str, ...] = ()
    """Settings of engine.* that not every engine honours and this one does."""
    optimizers: tuple[str, ...] = ("adamw", "apex_adam")
    """Values of optim.name."""
    counts: Callable[[int, int, str], str | None] | None = None
    """Of micro-batches a step, parallel.pipeline and parallel.schedule: what the schedule needs, where it cannot run these."""
    more: str | None = None
    """Where a function is that finds more: of a RunConfig, the sentences on what cannot work."""


OPTIONAL = ("bucket_mb", "overlap", "gradients", "extra", "offload_folder", "compile", "offload_activations")
"""Settings of engine.* that an engine must say it honours."""


def needed(micro_batches: int, pipeline: int, schedule: str) -> str | None:
    """What a schedule of torch.distributed.pipelining needs, where it cannot run so many micro-batches; else None."""
    if schedule == "1f1b" and micro_batches < pipeline:
        return f"at least {pipeline}"
    rounds = max(1, micro_batches // pipeline)
    if schedule in ("interleaved", "zero_bubble") and micro_batches % rounds:
        return f"a number that its {rounds} rounds of about {pipeline} divide"
    return None


SUPPORTS = {
    "native": Supports("hpclm.engine.native:NativeEngine", options=("bucket_mb", "compile", "offload_activations")),
    "deepspeed": Supports(
        "hpclm.engine.deepspeed:build",
        zero_stages=(1, 0, 2, 3),
        pipeline_stages=(1,),
        schedules=("1f1b",),
        offload=(("optimizer", 1), ("optimizer", 2), ("optimizer", 3), ("parameters", 3)),
        options=("bucket_mb", "overlap", "gradients", "extra", "offload_folder", "compile"),
        optimizers=("adamw", "apex_adam", "cpu_adam"),
        more="hpclm.config.deepspeed:unsuitable",
    ),
    "fairscale": Supports(
        "hpclm.engine.fairscale:FairScaleEngine",
        zero_stages=(3, 2),
        options=("bucket_mb", "gradients", "offload_activations"),
    ),
    "fsdp2": Supports(
        "hpclm.engine.fsdp2:FSDP2Engine",
        zero_stages=(3, 2),
        options=("gradients", "compile", "offload_activations"),
    ),
    "pipelining": Supports(
        "hpclm.engine.pipelining:PipeliningEngine",
        pipeline_stages=(0,),
        alone=False,
        schedules=("1f1b", "gpipe", "interleaved", "zero_bubble"),
        counts=needed,
    ),
}


def problems(engine: "EngineConfig", parallel: "ParallelConfig", optimizer: str, can: Supports) -> Iterator[str]:
    """What an engine that ``can`` do some things cannot do of the settings."""
    name, pipeline, chosen = engine.name, parallel.pipeline, engine.chosen()
    allowed = can.pipeline_stages if pipeline > 1 else can.zero_stages
    if pipeline > 1 and not allowed:
        able = ", ".join(sorted(other for other, its in SUPPORTS.items() if its.pipeline_stages))
        yield f"engine {name!r} has no pipeline, and parallel.pipeline={pipeline}; engines that have one: {able}"
        return
    if pipeline == 1 and not can.alone:
        yield f"engine {name!r} is a pipeline, and parallel.pipeline=1; set parallel.pipeline, or engine.name=native"
        return
    stage = engine.zero_stage
    if stage is not None and stage not in allowed:
        with_pipeline = f" with parallel.pipeline={pipeline}" if pipeline > 1 else ""
        yield (
            f"engine {name!r} cannot do engine.zero_stage={stage}{with_pipeline}; "
            f"it can do stage{'s' * (len(allowed) > 1)} {', '.join(map(str, sorted(allowed)))}"
        )
        return
    stage = allowed[0] if stage is None else stage
    if pipeline > 1 and parallel.schedule not in can.schedules:
        yield f"engine {name!r} cannot do parallel.schedule={parallel.schedule}; it can do {', '.join(can.schedules)}"
    if engine.offload != "none" and (engine.offload, stage) not in can.offload:
        ways = [f"{what} at zero_stage={at}" for what, at in can.offload]
        way_out = f"it can do {', '.join(ways)}" if ways else "engines that can: deepspeed"
        yield f"engine {name!r} cannot do engine.offload={engine.offload} at engine.zero_stage={stage}; {way_out}"
    for option in OPTIONAL:
        if option in chosen and option not in can.options:
            able = ", ".join(other for other, its in SUPPORTS.items() if option in its.options)
            yield f"engine.{option}={chosen[option]} has no effect with engine {name!r}; it is for {able}"
    if optimizer not in can.optimizers:
        yield f"engine {name!r} cannot do optim.name={optimizer}; it can do {', '.join(can.optimizers)}"
