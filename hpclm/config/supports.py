"""The features of each engine, and their comparison with a run's settings before it is queued. Imports no engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from hpclm.base.registry import load
from hpclm.config.checks import RefusedSettingError, assignment
from hpclm.config.optimizers import OPTIMIZERS


class Asking(Protocol):
    """The settings that FEATURES read: a RunConfig, or an EngineSettings."""

    @property
    def model(self) -> Any:
        """The ModelConfig."""

    @property
    def engine(self) -> Any:
        """The EngineConfig."""

    @property
    def parallel(self) -> Any:
        """The ParallelConfig."""

    @property
    def optim(self) -> Any:
        """The OptimConfig."""


@dataclass(frozen=True)
class Supports:
    """The features of an engine."""

    path: str
    """module:name of the engine's class, or of a function that constructs it."""
    zero_stages: tuple[int, ...] = (0,)
    """Values of engine.zero_stage without a pipeline; the first is the default."""
    pipeline_stages: tuple[int, ...] = ()
    """Values of engine.zero_stage with a pipeline; empty: it does not support pipelines."""
    hybrid: tuple[int, ...] = ()
    """ZeRO stages at which it supports parallel.shard, without a pipeline."""
    alone: bool = True
    """Whether it supports runs without a pipeline."""
    schedules: tuple[str, ...] = ()
    """Values of parallel.schedule."""
    offload: tuple[tuple[str, int], ...] = ()
    """Supported pairs of engine.offload and ZeRO stage."""
    options: tuple[str, ...] = ()
    """Settings among OPTIONAL that it supports."""
    compiled: bool = False
    """Whether it compiles on GPUs unless engine.compile=false."""
    matrices: bool = False
    """Whether it supports optimizers that update whole matrices."""
    context: bool = False
    """Whether it supports parallel.context."""
    guards: bool = True
    """Whether it supports optim.guard."""
    splits_by_replica: bool = False
    """Whether it supports blocks with different weights on data-parallel ranks (Placement.data_ranks)."""
    freezes: bool = False
    """Whether it supports model.freeze."""
    frozen_stages: bool = False
    """Whether it supports pipeline stages without trained weights."""
    clips_qk: bool = False
    """Whether it supports optim.qk_clip."""
    averages: bool = False
    """Whether it supports optim.ema."""
    simulated: bool = False
    """Whether it runs on fake tensors; DeepSpeed and FairScale cannot, because they read values and storage of tensors."""
    recompute_with_tensor: bool = True
    """Whether it supports engine.recompute=full with parallel.tensor."""
    counts: Callable[[int, int, str], str | None] | None = None
    """(micro-batches per step, parallel.pipeline, parallel.schedule) -> the requirement that the schedule does not meet, or None."""
    more: str | None = None
    """module:name of a function that yields further problems of a RunConfig with this engine."""
    torch: str | None = None
    """The oldest PyTorch release that it runs with, if hpclm supports older ones."""
    torch_to_compile: Mapping[int | None, str] = field(default_factory=dict)
    """engine.zero_stage -> the oldest PyTorch release that compiles it correctly, if hpclm supports older ones."""
    unavailable: str | None = None
    """module:name of a function that returns why it cannot run with the installed PyTorch, or None."""

    def stages(self, pipeline: int) -> tuple[int, ...]:
        """Values of engine.zero_stage with this parallel.pipeline, the default first; empty if it does not support this size."""
        if pipeline > 1:
            return self.pipeline_stages
        return self.zero_stages if self.alone else ()

    def divides(self, run: Any) -> bool:
        """Whether it supports the run's parallel.pipeline."""
        return bool(self.stages(run.parallel.pipeline))

    def stage(self, run: Any) -> int:
        """The run's ZeRO stage: engine.zero_stage, or the default."""
        if run.engine.zero_stage is not None:
            return int(run.engine.zero_stage)
        return next(iter(self.stages(run.parallel.pipeline)), 0)

    def optimizers(self, optim: Any) -> list[str]:
        """Values of optim.name that the engine supports with the other settings of ``optim``."""
        return [
            name
            for name, kind in OPTIMIZERS.items()
            if (self.matrices or not kind.matrices) and (self.offload or not kind.offloaded)
        ]


OPTIONAL = (
    *("bucket_mb", "gradients", "extra", "fp8"),
    *("offload_folder", "compile", "offload_activations", "defer_reduction"),
)
"""Settings of engine.* that only some engines support."""


def needed(micro_batches: int, pipeline: int, schedule: str) -> str | None:
    """The number of micro-batches that a torch.distributed.pipelining schedule requires; None if it can run this number."""
    if schedule == "1f1b" and micro_batches < pipeline:
        return f"at least {pipeline}"
    rounds = max(1, micro_batches // pipeline)
    if schedule in ("interleaved", "zero_bubble") and micro_batches % rounds:
        return f"a multiple of its {rounds} rounds of about {pipeline}"
    return None


SUPPORTS = {
    "native": Supports(
        "hpclm.engine.sharded_optimizer:build",
        zero_stages=(0, 1),
        hybrid=(1,),
        options=("bucket_mb", "gradients", "fp8", "compile", "offload_activations"),
        compiled=True,
        matrices=True,
        clips_qk=True,
        splits_by_replica=True,
        context=True,
        simulated=True,
        freezes=True,
        averages=True,
    ),
    "deepspeed": Supports(
        "hpclm.engine.deepspeed:build",
        zero_stages=(1, 0, 2, 3),
        pipeline_stages=(1,),
        schedules=("1f1b",),
        offload=(("optimizer", 1), ("optimizer", 2), ("optimizer", 3), ("parameters", 3)),
        options=("bucket_mb", "gradients", "fp8", "extra", "offload_folder", "compile"),
        torch_to_compile={3: "2.12"},  # with 2.11, compiled blocks get gradients of 0
        guards=False,
        more="hpclm.config.deepspeed:unsuitable",
        freezes=True,
        averages=True,
    ),
    "fairscale": Supports(
        "hpclm.engine.fairscale:build",
        zero_stages=(3, 2),
        options=("bucket_mb", "gradients", "fp8", "offload_activations"),
        recompute_with_tensor=False,  # weights are freed once they have gradients, which biases then have too early
        freezes=True,
        averages=True,
    ),
    "fsdp2": Supports(
        "hpclm.engine.fsdp2:build",
        zero_stages=(3, 2),
        hybrid=(3, 2),
        options=("gradients", "fp8", "compile", "offload_activations", "defer_reduction"),
        compiled=True,
        matrices=True,
        clips_qk=True,
        splits_by_replica=True,
        context=True,
        simulated=True,
        freezes=True,
        averages=True,
    ),
    "pipelining": Supports(
        "hpclm.engine.pipelining:PipeliningEngine",
        torch="2.12",  # its PipelineStage takes input_grads and output_grads
        unavailable="hpclm.engine.pipelining:unavailable",
        pipeline_stages=(0, 1),
        alone=False,
        schedules=("1f1b", "gpipe", "interleaved", "zero_bubble"),
        options=("fp8",),
        counts=needed,
        matrices=True,
        clips_qk=True,
        splits_by_replica=True,
        context=True,
        simulated=True,
        freezes=True,
        averages=True,
        frozen_stages=True,
    ),
}


class Feature(NamedTuple):
    """A feature that settings may ask of an engine."""

    key: str
    """The setting that asks for it."""
    asked: Callable[[Any], Any]
    """Whether a run asks for it."""
    has: Callable[[Supports, Any], Any]
    """Whether an engine supports it in this run."""
    instead: Callable[[Supports, Any], str] = lambda can, run: ""
    """The values that the engine supports instead, in words; may be empty."""
    detail: Callable[[Supports, Any], str] = lambda can, run: ""
    """Further settings on which the support depends, or why an engine does not support it."""

    def lacks(self, can: Supports, run: Any) -> bool:
        """Whether the run asks for it and the engine does not support it; False if it depends on a refused setting."""
        try:
            return bool(self.asked(run) and not self.has(can, run))
        except RefusedSettingError:
            return False

    def sentence(self, can: Supports, run: Any) -> str:
        """The message that the engine of the run does not support it."""
        sentence = f"engine {run.engine.name!r} does not support {assignment(run, self.key)}{self.detail(can, run)}"
        instead = self.instead(can, run)
        return f"{sentence}; it supports {instead}" if instead else sentence


def _at_stage_of(can: Supports, run: Any) -> str:
    return f" at engine.zero_stage={can.stage(run)}"


def _of_pipeline(can: Supports, run: Any) -> str:
    if run.parallel.pipeline == 1:
        return ""
    return f" with {assignment(run, 'parallel.pipeline')}"


def _option(name: str) -> Feature:
    """A setting of engine.* that only some engines support; all support False."""
    return Feature(
        f"engine.{name}",
        lambda run: run.engine.changed(name) and getattr(run.engine, name) is not False,
        lambda can, run: name in can.options,
    )


FEATURES = (
    Feature("parallel.pipeline", lambda run: run.parallel.pipeline > 1, lambda can, run: can.pipeline_stages),
    Feature(
        "parallel.pipeline",
        lambda run: run.parallel.pipeline == 1,
        lambda can, run: can.alone,
        lambda can, run: "2 or more",
    ),
    Feature(
        "engine.zero_stage",
        lambda run: run.engine.zero_stage is not None,
        lambda can, run: run.engine.zero_stage in can.stages(run.parallel.pipeline) or not can.divides(run),
        lambda can, run: _stages(can.stages(run.parallel.pipeline)),
        _of_pipeline,
    ),
    Feature(
        "parallel.shard",
        lambda run: run.parallel.shard is not None,
        lambda can, run: run.parallel.pipeline == 1 and can.stage(run) in can.hybrid,
        lambda can, run: f"it at {_stages(can.hybrid)} without a pipeline" if can.hybrid else "",
        lambda can, run: _at_stage_of(can, run) + _of_pipeline(can, run),
    ),
    Feature(
        "parallel.schedule",
        lambda run: run.parallel.pipeline > 1,
        lambda can, run: run.parallel.schedule in can.schedules or not can.divides(run),
        lambda can, run: ", ".join(can.schedules),
    ),
    Feature(
        "engine.offload",
        lambda run: run.engine.offload != "none",
        lambda can, run: (run.engine.offload, can.stage(run)) in can.offload,
        lambda can, run: ", ".join(f"{what} at zero_stage={stage}" for what, stage in can.offload),
        _at_stage_of,
    ),
    Feature("parallel.context", lambda run: run.parallel.context > 1, lambda can, run: can.context),
    Feature("parallel.expert", lambda run: run.parallel.expert > 1, lambda can, run: can.splits_by_replica),
    Feature(
        "engine.recompute",
        lambda run: run.engine.recompute == "full" and run.parallel.tensor > 1,
        lambda can, run: can.recompute_with_tensor,
        lambda can, run: "selective",
        lambda can, run: f" with {assignment(run, 'parallel.tensor')}",
    ),
    *map(_option, OPTIONAL),
    # the needs of a user's own optimizer are unknown before it is imported (hpclm.engine.user_optimizers)
    Feature(
        "optim.name",
        lambda run: run.optim.name in OPTIMIZERS,
        lambda can, run: run.optim.name in can.optimizers(run.optim),
        lambda can, run: ", ".join(can.optimizers(run.optim)),
    ),
    Feature(
        "optim.guard",
        lambda run: run.optim.guard != "none",
        lambda can, run: can.guards,
        detail=lambda can, run: ", since its updates are the library's",
    ),
    Feature("model.freeze", lambda run: run.model.freeze, lambda can, run: can.freezes),
    Feature("optim.qk_clip", lambda run: run.optim.qk_clip is not None, lambda can, run: can.clips_qk),
    Feature("optim.ema", lambda run: run.optim.ema is not None, lambda can, run: can.averages),
)
"""Everything that only some engines support."""


def unsupported(run: Asking, can: Supports) -> list[str]:
    """Problems with a run whose engine does not support its settings. They name the engines that do, or what each of them lacks."""
    lacking = [feature for feature in FEATURES if feature.lacks(can, run)]
    if not lacking:
        return _more(can, run)
    able = list(_able(run))
    way_out = f"; engines that do: {', '.join(able)}" if able else ""
    problems = [f"{feature.sentence(can, run)}{way_out}" for feature in lacking]
    if not able:
        others = (_lacking(name, other, run) for name, other in SUPPORTS.items() if name != run.engine.name)
        problems.append(f"no engine supports all that these settings ask for: {'; '.join(others)}")
    return problems + _more(can, run)


def _able(run: Any) -> Iterator[str]:
    """The engines that support a run's settings, with their ZeRO stage if it is not their default."""
    for name, can in SUPPORTS.items():
        stages = can.stages(run.parallel.pipeline)
        if run.engine.zero_stage is not None:
            stages = (run.engine.zero_stage,)
        for stage in stages:
            other = _at_stage(run, stage)
            if not any(feature.lacks(can, other) for feature in FEATURES) and not _more(can, other):
                yield name if stage in stages[:1] else f"{name} with engine.zero_stage={stage}"
                break


def _at_stage(run: Any, stage: int) -> Any:
    """The run with another engine.zero_stage, unchecked."""
    other = copy(run)
    vars(other)["engine"] = copy(run.engine)
    vars(other.engine)["zero_stage"] = stage
    return other


def with_feature(has: Callable[[Supports], Any]) -> str:
    """The names of the engines for which ``has`` is true."""
    return ", ".join(name for name, can in SUPPORTS.items() if has(can))


def _stages(stages: Sequence[int]) -> str:
    if not stages:
        return ""
    several = "s" if len(stages) > 1 else ""
    return f"stage{several} {', '.join(map(str, sorted(stages)))}"


def _lacking(name: str, can: Supports, run: Any) -> str:
    settings = [assignment(run, feature.key) for feature in FEATURES if feature.lacks(can, run)]
    if settings:
        return f"{name} lacks {', '.join(settings)}"
    return f"{name}: {' and '.join(_more(can, run))}"


def _more(can: Supports, run: Any) -> list[str]:
    """The problems of an engine that ``can.more`` finds."""
    if not can.more or not hasattr(run, "for_engine"):
        return []
    try:
        return list(load(can.more)(run))
    except RefusedSettingError:
        return []
