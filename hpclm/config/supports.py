"""What each engine supports, as data: checked before a job is queued, without importing any engine."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Supports:
    """What an engine supports."""

    path: str
    """module:name of its class."""
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
    """Whether it is compiled on GPUs unless engine.compile=false."""
    matrices: bool = False
    """Whether optimizers that work on whole matrices can run."""
    any_state: bool = True
    """Whether optimizers may keep more than tensors of the weights' shapes; otherwise the library flattens weights."""
    context: bool = False
    """Whether it supports parallel.context."""
    guards: bool = True
    """Whether it supports optim.guard."""
    splits_by_replica: bool = False
    """Whether it supports blocks of which data-parallel ranks hold different weights (Placement.data_ranks)."""
    clips_qk: bool = False
    """Whether it supports optim.qk_clip."""
    counts: Callable[[int, int, str], str | None] | None = None
    """(micro-batches per step, parallel.pipeline, parallel.schedule) -> what the schedule requires, if it cannot run them."""
    more: str | None = None
    """module:name of a function that yields further problems of a RunConfig."""
    torch: str | None = None
    """The oldest PyTorch release that has what it uses, if newer than the oldest that hpclm supports."""
    torch_to_compile: Mapping[int | None, str] = field(default_factory=dict)
    """engine.zero_stage -> the oldest PyTorch release that compiles it correctly, where that is a newer one."""
    unavailable: str | None = None
    """module:name of a function that says why it cannot run with the PyTorch that is installed, or returns None."""


OPTIONAL = (
    *("bucket_mb", "gradients", "extra", "fp8"),
    *("offload_folder", "compile", "offload_activations", "defer_reduction"),
)
"""Settings of engine.* that only some engines support."""


def needed(micro_batches: int, pipeline: int, schedule: str) -> str | None:
    """What a torch.distributed.pipelining schedule requires, if it cannot run this number of micro-batches; else None."""
    if schedule == "1f1b" and micro_batches < pipeline:
        return f"at least {pipeline}"
    rounds = max(1, micro_batches // pipeline)
    if schedule in ("interleaved", "zero_bubble") and micro_batches % rounds:
        return f"a multiple of its {rounds} rounds of about {pipeline}"
    return None


def unsuitable_for_fairscale(config: Any) -> Iterator[str]:
    """FairScale frees a block's weights as soon as they have gradients; with tensor parallelism biases have them too early."""
    if config.engine.recompute == "full" and config.parallel.tensor > 1:
        yield "engine 'fairscale' does not support engine.recompute=full with parallel.tensor; use selective, or engine.name=fsdp2"


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
    ),
    "deepspeed": Supports(
        "hpclm.engine.deepspeed:build",
        zero_stages=(1, 0, 2, 3),
        pipeline_stages=(1,),
        schedules=("1f1b",),
        offload=(("optimizer", 1), ("optimizer", 2), ("optimizer", 3), ("parameters", 3)),
        options=("bucket_mb", "gradients", "fp8", "extra", "offload_folder", "compile"),
        torch_to_compile={3: "2.12"},  # with 2.11, compiled blocks get gradients of 0
        any_state=False,
        guards=False,
        more="hpclm.config.deepspeed:unsuitable",
    ),
    "fairscale": Supports(
        "hpclm.engine.fairscale:build",
        zero_stages=(3, 2),
        options=("bucket_mb", "gradients", "fp8", "offload_activations"),
        more="hpclm.config.supports:unsuitable_for_fairscale",
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
    ),
    "pipelining": Supports(
        "hpclm.engine.pipelining:PipeliningEngine",
        torch="2.12",  # its PipelineStage takes input_grads and output_grads
        unavailable="hpclm.engine.pipelining:unavailable",
        pipeline_stages=(0,),
        alone=False,
        schedules=("1f1b", "gpipe", "interleaved", "zero_bubble"),
        options=("fp8",),
        counts=needed,
        matrices=True,
        clips_qk=True,
        splits_by_replica=True,
        context=True,
    ),
}
