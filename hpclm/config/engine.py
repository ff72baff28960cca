"""Settings of the engine and of parallelism."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from hpclm.base import extras
from hpclm.base.errors import ConfigError
from hpclm.config.section import Rule, Section
from hpclm.config.setting import setting
from hpclm.config.supports import SUPPORTS, Supports

STAGES = "parallel.pipeline>1"
ENGINES = {name: supports.path for name, supports in SUPPORTS.items()}


@dataclass(frozen=True)
class ParallelConfig(Section, key="parallel"):
    """How the model is split over processes; the rest is data parallelism."""

    tensor: int = setting(1, "Tensor-parallel size, with sequence parallelism; best within a node.", at_least=1)
    context: int = setting(1, "Context-parallel size: processes that share a sequence.", at_least=1)
    pipeline: int = setting(1, "Pipeline stages.", at_least=1)
    expert: int = setting(
        1,
        "Number of consecutive data-parallel ranks (context-parallel ones included) to divide the experts among.",
        at_least=1,
        only_with="model.experts.count",
    )
    split_experts: bool = setting(
        True,
        "Split each expert over parallel.tensor; false: every tensor-parallel rank keeps whole experts and "
        "processes its own slice of the sequence.",
        only_with=("parallel.tensor>1", "model.experts.count"),
    )
    shard: int | None = setting(
        None,
        "Hybrid sharding: group size, usually a node's GPUs; null: all data-parallel ranks.",
        at_least=2,
        advice="to shard nothing, set parallel.shard=null engine.name=native engine.zero_stage=0",
    )
    partition: Literal["parameters", "blocks"] = setting(
        "parameters", "Balance stages by parameters or blocks.", only_with=STAGES
    )
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = setting(
        "1f1b", "Pipeline schedule.", only_with=STAGES
    )
    chunks: int = setting(
        1, "Stages per process.", at_least=1, only_with=(STAGES, "parallel.schedule=interleaved|zero_bubble")
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda parallel: parallel.pipeline > 1 and parallel.chunks == 1 and parallel.schedule == "interleaved",
            "parallel.schedule=interleaved needs parallel.chunks of 2 or more; with 1 it is 1f1b",
        ),
    )

    def shard_size(self, data: int) -> int:
        """How many of ``data`` data-parallel ranks divide weights or optimizer state; ConfigError if it is not a divisor of ``data``."""
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
    def stages(self) -> int:
        """Stages of the pipeline over all processes."""
        return self.pipeline * self.chunks

    @property
    def smallest(self) -> int:
        """The smallest number of processes that can train: one replica, or the replicas that divide the experts."""
        return self.model * math.lcm(self.context, self.expert)


@dataclass(frozen=True)
class EngineConfig(Section, key="engine"):
    """The engine that runs training steps, and how it computes."""

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
        None, "Folder on an NVMe disk of each node.", path=True, only_with="engine.offload"
    )
    bucket_mb: float | None = setting(
        None,
        "Size of gradient buckets in MB; null: the library's default (native: 25, or more on GPUs of several nodes).",
        more_than=0,
    )
    gradients: Literal["auto", "fp32", "compute"] = setting(
        "auto",
        "Type of the gradients that ranks reduce (deepspeed: and accumulate); compute: the type of activations. auto: "
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
        "Compute the blocks' linear layers in FP8, with one scale per tensor or per row; null: in "
        "engine.precision. Needs engine.precision=bf16. Weight gradients, the first and the last block stay in "
        "bf16.",
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
        1, "Blocks that are recomputed together.", at_least=1, unit="blocks", only_with="engine.recompute=full"
    )
    offload_activations: bool = setting(
        False, "Keep activations in CPU memory until the backward pass; GPUs only, uncompiled and slow."
    )
    loss_chunk: int | None = setting(
        None,
        "Number of tokens whose logits are computed together; null: 512 on CPUs, 4096 on GPUs, more on GPUs with at least 60 GiB.",
        at_least=1,
        unit="tokens",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda engine: engine.compile and engine.offload_activations,
            "{engine.compile} does not support {engine.offload_activations}, which changes the strides that compiled code relies on",
        ),
    )

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
        """Settings that need a GPU for training, if engine.device=cpu; evaluations may have them."""
        if self.device != "cpu":
            return []
        return list(self.problems_without_gpu())

    def missing_libraries(self) -> list[str]:
        """A problem for each library that the engine needs and that is missing or too old here. Imports nothing."""
        problems: list[str | None] = []
        if self.name in extras.EXTRAS:
            problems.append(extras.missing(f"engine.name={self.name}", self.name))
        supports = SUPPORTS.get(self.name, Supports(self.name))
        installed = supports.torch and extras.older("torch", supports.torch)
        if installed:
            problems.append(torch_too_old(self.name, installed))
        release = supports.torch_to_compile.get(self.zero_stage)
        installed = release and extras.older("torch", release)
        if self.compile and release and installed:
            what = f"engine.compile=true with engine.name={self.name} engine.zero_stage={self.zero_stage}"
            way_out = "install a newer one, or leave engine.compile out"
            problems.append(extras.too_old(what, "PyTorch", release, installed, way_out))
        return list(filter(None, problems))


def torch_too_old(name: str, installed: str) -> str:
    """The message that an engine needs a newer PyTorch than the installed one, with the engines that do not."""
    others = [
        f"engine.name={other} (parallel.schedule={', '.join(supports.schedules)})"
        for other, supports in SUPPORTS.items()
        if supports.pipeline_stages and not supports.torch
    ]
    way_out = f"install a newer one, or use {' or '.join(others)}"
    return extras.too_old(f"engine.name={name}", "PyTorch", SUPPORTS[name].torch or "", installed, way_out)
