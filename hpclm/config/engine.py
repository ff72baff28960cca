"""Settings of the engine and of parallelism."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal

from hpclm import extras
from hpclm.config.checks import Checked, at_least
from hpclm.config.model import ModelConfig
from hpclm.config.optim import OptimConfig, ScalerConfig
from hpclm.config.optimizers import OPTIMIZERS
from hpclm.config.plan import Plan
from hpclm.config.setting import setting
from hpclm.config.supports import OPTIONAL, SUPPORTS, Supports
from hpclm.errors import ConfigError
from hpclm.registry import problem

ENGINES = {name: supports.path for name, supports in SUPPORTS.items()}


@dataclass(frozen=True)
class ParallelConfig(Checked):
    """How the model is split over processes; the rest is data parallelism."""

    tensor: int = setting(1, "Tensor-parallel size, with sequence parallelism; best within a node.", at_least=1)
    context: int = setting(1, "Context-parallel size: processes that share a sequence.", at_least=1)
    pipeline: int = setting(1, "Pipeline stages.", at_least=1)
    expert: int = setting(
        1,
        "Consecutive data-parallel ranks, context-parallel ones among them, that share out the experts "
        "(model.experts).",
        at_least=1,
        only_with="model.experts",
    )
    split_experts: bool = setting(
        True,
        "Split each expert over parallel.tensor; false: each process of it has whole experts, for the tokens of "
        "its part of the sequence.",
        only_with=("parallel.tensor>1", "model.experts"),
    )
    shard: int | None = setting(
        None,
        "Hybrid sharding: group size, usually a node's GPUs; null: all data-parallel ranks.",
        at_least=2,
        advice="to shard nothing, set parallel.shard=null engine.name=native engine.zero_stage=0",
    )
    partition: Literal["parameters", "blocks", "time"] = setting(
        "parameters", "Balance stages by parameters, blocks, or measured time.", only_with="parallel.pipeline>1"
    )
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = setting(
        "1f1b", "Pipeline schedule.", only_with="parallel.pipeline>1"
    )
    chunks: int = setting(
        1,
        "Stages per process, with schedule=interleaved or zero_bubble.",
        at_least=1,
        only_with=("parallel.pipeline>1", "parallel.schedule=interleaved|zero_bubble"),
    )

    def problems(self) -> Iterator[str]:
        """Invalid parallel settings."""
        yield from at_least(1, "parallel", tensor=self.tensor, context=self.context)
        yield from at_least(1, "parallel", pipeline=self.pipeline, chunks=self.chunks, expert=self.expert)
        if self.shard is not None and self.shard < 2:
            yield f"parallel.shard={self.shard} must be at least 2; to shard nothing, set parallel.shard=null engine.name=native engine.zero_stage=0"
        if self.tensor == 1 and not self.split_experts:
            yield "parallel.split_experts=false has no effect with parallel.tensor=1"
        if self.pipeline == 1:
            for name in ("partition", "schedule", "chunks"):
                if self._changed(name):
                    yield f"parallel.{name}={getattr(self, name)} has no effect with parallel.pipeline=1"
        elif self.chunks > 1 and self.schedule not in ("interleaved", "zero_bubble"):
            yield f"parallel.chunks={self.chunks} has no effect with parallel.schedule={self.schedule}"
        elif self.chunks == 1 and self.schedule == "interleaved":
            yield "parallel.schedule=interleaved needs parallel.chunks of 2 or more; with 1 it is 1f1b"

    def shard_size(self, data: int) -> int:
        """Number of the ``data`` data-parallel ranks that share out weights or optimizer state; ConfigError if they cannot be divided."""
        size = min(self.shard or data, data)
        if data % size:
            raise ConfigError(
                f"{data} data-parallel ranks cannot be divided into groups of parallel.shard={size}; set parallel.shard to a "
                f"divisor of {data}, or to null"
            )
        return size

    @property
    def model(self) -> int:
        """Number of processes that hold one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def replica(self) -> int:
        """Number of processes that read the same samples."""
        return self.model * self.context

    @property
    def smallest(self) -> int:
        """The fewest processes that can train: those of one replica, or of as many as share out the experts."""
        return self.model * math.lcm(self.context, self.expert)


@dataclass(frozen=True)
class EngineConfig(Checked):
    """What runs training steps, and how it computes."""

    name: str = setting(
        "native",
        "native (plain PyTorch), deepspeed, fairscale, fsdp2 (fully_shard), pipelining (PyTorch's pipelines), or "
        "package.module:Name.",
        names=ENGINES,
    )
    zero_stage: int | None = setting(
        None,
        "Sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too; null: 0 for native, 1 for "
        "deepspeed, 3 for fairscale and fsdp2.",
        at_least=0,
        at_most=3,
    )
    offload: Literal["none", "optimizer", "parameters"] = setting(
        "none", "Keep optimizer state, or weights too, in CPU memory or offload_folder."
    )
    offload_folder: str | None = setting(
        None, "Folder on an NVMe disk of each node.", path=True, only_with="engine.offload!=none"
    )
    bucket_mb: float | None = setting(
        None,
        "Size of gradient buckets in MB; null: the library's; native: 25, more on GPUs of several nodes.",
        more_than=0,
        unit="MB",
    )
    gradients: Literal["auto", "fp32", "compute"] = setting(
        "auto",
        "Type in which gradients are reduced (deepspeed: and accumulated); compute: that of activations. auto: "
        "compute with deepspeed and fairscale, otherwise fp32.",
        warn_without="engine.precision!=fp32: activations and gradients are fp32",
    )
    defer_reduction: bool = setting(
        False, "fsdp2: reduce gradients once a step, not after every micro-batch; each process then holds all of them."
    )
    extra: dict[str, str] = setting({}, "Keys of DeepSpeed's JSON: engine.extra.zero_optimization.sub_group_size=1e8.")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: a GPU if there is one.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "auto",
        "Type of activations and products; weights and optimizer stay fp32. auto: bf16 if the GPU supports it, "
        "otherwise fp32.",
    )
    fp8: Literal["tensorwise", "rowwise"] | None = setting(
        None,
        "Products of the blocks' linear layers in FP8, with one scale a tensor or one a row; null: in "
        "engine.precision, which must be bf16. Gradients of weights, the first and the last block stay in bf16.",
    )
    deterministic: bool = setting(
        False,
        "Use only GPU kernels that give the same bits each time, so that resumed runs are bit-identical; slower.",
        warn_without="engine.device!=cpu: it chooses among kernels of GPUs",
    )
    compile: bool | None = setting(
        None, "Compile blocks and loss (torch.compile); null: on GPUs, with native and fsdp2."
    )
    recompute: Literal["none", "full", "selective"] = setting(
        "none", "Activation checkpointing: whole blocks (full), or the attention core (selective)."
    )
    recompute_every: int = setting(
        1,
        "With recompute=full, blocks recomputed together.",
        at_least=1,
        unit="blocks",
        only_with="engine.recompute=full",
    )
    offload_activations: bool = setting(False, "Keep activations in CPU memory until the backward pass; GPUs only.")
    loss_chunk: int | None = setting(
        None,
        "Tokens whose logits are computed at a time; null: 512 on CPUs, 4096 on GPUs, more from 60 GiB.",
        at_least=1,
        unit="tokens",
    )

    def problems(self) -> Iterator[str]:
        """Invalid engine settings."""
        wrong = problem("engine.name", self.name, ENGINES)
        if wrong:
            yield wrong
        yield from at_least(1, "engine", recompute_every=self.recompute_every, loss_chunk=self.loss_chunk)
        if self.zero_stage is not None and not 0 <= self.zero_stage <= 3:
            yield f"engine.zero_stage={self.zero_stage} must be 0, 1, 2 or 3"
        if self.bucket_mb is not None and not (self.bucket_mb > 0 and math.isfinite(self.bucket_mb)):
            yield f"engine.bucket_mb={self.bucket_mb} must be more than 0 and finite"
        if self.offload_folder and self.offload == "none":
            yield f"engine.offload_folder={self.offload_folder} has no effect with engine.offload=none"
        if self.recompute_every > 1 and self.recompute != "full":
            yield f"engine.recompute_every={self.recompute_every} has no effect with engine.recompute={self.recompute}"

    def problems_without_gpu(self) -> Iterator[str]:
        """Settings that need a GPU."""
        if self.device == "cuda":
            yield "engine.device=cuda, but PyTorch sees no GPU here; use engine.device=cpu or auto"
        if self.offload_activations:
            yield (
                "engine.offload_activations=true moves activations from the GPU to CPU memory, but this run computes on the "
                "CPU; leave it out, or use engine.recompute=full to keep fewer"
            )

    def problems_on_cpu(self) -> list[str]:
        """Settings that cannot be trained with engine.device=cpu, though evaluated."""
        return list(self.problems_without_gpu()) if self.device == "cpu" else []

    def missing_libraries(self) -> list[str]:
        """Libraries that the engine needs and that are not installed here, or are too old for it; imports none of them."""
        wrong = extras.missing(f"engine.name={self.name}", self.name) if self.name in extras.EXTRAS else None
        supports = SUPPORTS.get(self.name, Supports(self.name))
        problems = [wrong] if wrong else []
        if supports.torch and (installed := extras.older("torch", supports.torch)):
            problems.append(torch_too_old(self.name, installed))
        release = supports.torch_to_compile.get(self.zero_stage) if self.compile else None
        if release and (installed := extras.older("torch", release)):
            what = f"engine.compile=true with engine.name={self.name} engine.zero_stage={self.zero_stage}"
            way_out = "install a newer one, or leave engine.compile out"
            problems.append(extras.too_old(what, "PyTorch", release, installed, way_out))
        return problems

    def chosen(self) -> dict[str, object]:
        """The settings that differ from their defaults; not to compile is what any engine can do."""
        mine = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "compile" or self.compile}
        return {name: value for name, value in mine.items() if value != getattr(EngineConfig(), name)}


def torch_too_old(name: str, installed: str) -> str:
    """The message that an engine needs a newer PyTorch than the installed one, and which engines do not."""
    others = [
        f"engine.name={other} (parallel.schedule={', '.join(supports.schedules)})"
        for other, supports in SUPPORTS.items()
        if supports.pipeline_stages and not supports.torch
    ]
    way_out = f"install a newer one, or use {' or '.join(others)}"
    return extras.too_old(f"engine.name={name}", "PyTorch", SUPPORTS[name].torch or "", installed, way_out)


def optimizers(can: Supports, optim: OptimConfig) -> list[str]:
    """Values of optim.name, with its other settings, with which an engine with the capabilities ``can`` runs."""
    return [
        name
        for name, kind in OPTIMIZERS.items()
        if (can.matrices or not kind.matrices)
        and (can.any_state or kind.elementwise(optim))
        and (can.offload or not kind.offloaded)
    ]


def unsupported(engine: EngineConfig, parallel: ParallelConfig, optim: OptimConfig, can: Supports) -> Iterator[str]:
    """The settings that an engine with the capabilities ``can`` does not support, one sentence each."""
    name, pipeline, chosen = engine.name, parallel.pipeline, engine.chosen()
    allowed = can.pipeline_stages if pipeline > 1 else can.zero_stages
    if pipeline > 1 and not allowed:
        able = ", ".join(sorted(other for other, supports in SUPPORTS.items() if supports.pipeline_stages))
        yield f"engine {name!r} does not support parallel.pipeline={pipeline}; engines that do: {able}"
        return
    if pipeline == 1 and not can.alone:
        yield f"engine {name!r} needs parallel.pipeline of 2 or more; set it, or engine.name=native"
        return
    stage = engine.zero_stage
    if stage is not None and stage not in allowed:
        with_pipeline = f" with parallel.pipeline={pipeline}" if pipeline > 1 else ""
        yield (
            f"engine {name!r} does not support engine.zero_stage={stage}{with_pipeline}; "
            f"it supports stage{'s' * (len(allowed) > 1)} {', '.join(map(str, sorted(allowed)))}"
        )
        return
    stage = allowed[0] if stage is None else stage
    if parallel.shard is not None and (pipeline > 1 or stage not in can.hybrid):
        ways = [
            f"engine.name={other} engine.zero_stage={at}"
            for other, supports in SUPPORTS.items()
            for at in supports.hybrid
        ]
        with_pipeline = f" and parallel.pipeline={pipeline}" if pipeline > 1 else ""
        yield (
            f"engine {name!r} at engine.zero_stage={stage}{with_pipeline} does not support parallel.shard={parallel.shard}; set "
            f"parallel.shard=null, or one of these without a pipeline: {', '.join(ways)}"
        )
    if pipeline > 1 and parallel.schedule not in can.schedules:
        yield f"engine {name!r} does not support parallel.schedule={parallel.schedule}; it supports {', '.join(can.schedules)}"
    if engine.offload != "none" and (engine.offload, stage) not in can.offload:
        ways = [f"{what} at zero_stage={at}" for what, at in can.offload]
        way_out = f"it supports {', '.join(ways)}" if ways else "engines that do: deepspeed"
        yield f"engine {name!r} does not support engine.offload={engine.offload} at engine.zero_stage={stage}; {way_out}"
    if parallel.context > 1 and not can.context:
        able = ", ".join(other for other, supports in SUPPORTS.items() if supports.context)
        yield f"engine {name!r} does not support parallel.context={parallel.context}; engines that do: {able}"
    if parallel.expert > 1 and not can.splits_by_replica:
        able = ", ".join(other for other, supports in SUPPORTS.items() if supports.splits_by_replica)
        yield f"engine {name!r} does not support parallel.expert={parallel.expert}; engines that do: {able}"
    for option in OPTIONAL:
        if option in chosen and option not in can.options:
            able = ", ".join(other for other, supports in SUPPORTS.items() if option in supports.options)
            yield f"engine.{option}={chosen[option]} has no effect with engine {name!r}; it applies to {able}"
    # what one of the user's own needs is not known before it is imported (hpclm.engine.user_optimizers)
    if optim.name in OPTIMIZERS and optim.name not in (names := optimizers(can, optim)):
        yield f"engine {name!r} does not support optim.name={optim.name}; it supports {', '.join(names)}"
    if optim.guard != "none" and not can.guards:
        able = ", ".join(other for other, supports in SUPPORTS.items() if supports.guards)
        yield f"engine {name!r} does not support optim.guard={optim.guard}, since its updates are the library's; engines that do: {able}"
    if optim.qk_clip is not None and not can.clips_qk:
        able = ", ".join(other for other, supports in SUPPORTS.items() if supports.clips_qk)
        yield f"engine {name!r} does not support optim.qk_clip={optim.qk_clip:g}; engines that do: {able}"


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is made from, besides what it computes with; RunConfig.for_engine() makes it."""

    model: ModelConfig
    plan: Plan
    optim: OptimConfig = field(default_factory=OptimConfig)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    seed: int = 1234
    loss_norm: str = "token"
    """As batch.loss_norm."""
    all_tokens_count: bool = False
    """Whether the training data masks no token in the loss, so that the host knows how many count."""
    timers: bool = False
    """As log.timers."""
    file_mb: float = 16.0
    """As checkpoint.file_mb."""
    saves: bool = True
    """As checkpoint.enabled."""
    in_place: bool = True
    """Whether backward passes may add to the fp32 gradients in place, where the engine and the device can."""
