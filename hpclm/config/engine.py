"""Settings of what computes, and of how processes divide the work."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal

from hpclm.config.checks import Checked, at_least
from hpclm.config.supports import SUPPORTS
from hpclm.registry import problem

ENGINES = {name: supports.path for name, supports in SUPPORTS.items()}


@dataclass(frozen=True)
class ParallelConfig(Checked):
    """How processes divide the model; what is left of them are data-parallel replicas."""

    tensor: int = 1
    """Processes that share every layer, and between layers the tokens of each sequence (Megatron's tensor parallelism, with
    sequence parallelism); best inside a node."""
    pipeline: int = 1
    """Stages, each on processes of its own, that the layers are divided over."""
    partition: Literal["parameters", "blocks", "time"] = "parameters"
    """What pipeline stages get as equal a share of: parameters, blocks, or the time that each layer takes here."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b"
    """Order in which a pipeline works on micro-batches."""
    chunks: int = 1
    """Stages of each process with schedule=interleaved or zero_bubble, for a smaller bubble and more communication."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the layout."""
        yield from at_least(1, "parallel", tensor=self.tensor, pipeline=self.pipeline, chunks=self.chunks)
        if self.pipeline == 1:
            for name in ("partition", "schedule", "chunks"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    yield f"parallel.{name}={getattr(self, name)} has no effect with parallel.pipeline=1"
        elif self.chunks > 1 and self.schedule not in ("interleaved", "zero_bubble"):
            yield f"parallel.chunks={self.chunks} has no effect with parallel.schedule={self.schedule}"
        elif self.chunks == 1 and self.schedule == "interleaved":
            yield "parallel.schedule=interleaved needs parallel.chunks of 2 or more; with 1 it is 1f1b"

    @property
    def model(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class EngineConfig(Checked):
    """What computes, and how."""

    name: str = "native"
    """native (plain PyTorch), deepspeed (ZeRO, and its pipeline), fairscale (its FSDP), fsdp2 (PyTorch's fully_shard),
    pipelining (PyTorch's pipelines), or package.module:Name."""
    zero_stage: int | None = None
    """What replicas share out (Rajbhandari et al. 2020): 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too; null:
    0 for native, 1 for deepspeed, 3 for fairscale and fsdp2."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lies in the CPU's memory (or offload_folder) instead of the GPU's: the optimizer's state, or the weights too."""
    offload_folder: str | None = None
    """Folder on an NVMe disk of each node that offload uses instead of the CPU's memory."""
    bucket_mb: float | None = None
    """Gradients, in megabytes, that are reduced together; null: what the engine's library thinks best."""
    overlap: bool = True
    """Reduce gradients while the backward pass goes on."""
    gradients: Literal["auto", "fp32"] = "auto"
    """Type in which gradients are reduced and, by deepspeed, accumulated: auto is the engine's own, which for fp16 and bf16 is
    the type of its weights."""
    extra: dict[str, str] = field(default_factory=dict)
    """More keys of DeepSpeed's JSON, dotted: engine.extra.zero_optimization.sub_group_size=1e8. None may contradict a setting."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of activations and matrix products; weights and optimizer stay fp32. auto: bf16 on GPUs that have it, else fp32."""
    matmul: Literal["auto", "exact", "fast"] = "auto"
    """How fp32 products run. fast: oneDNN on CPUs, TF32 on GPUs. auto: fast where fast keeps fp32's precision, else exact."""
    compile: bool = False
    """torch.compile for the blocks and the loss."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Forget activations and compute them again in the backward pass: none, whole blocks, or the attention core only."""
    recompute_every: int = 1
    """With recompute=full, blocks that are forgotten and computed again together."""
    offload_activations: bool = False
    """Keep what the backward pass needs in the CPU's memory meanwhile; slower, and only for GPUs."""
    loss_chunk: int | None = None
    """Rows (tokens) of the logits that exist at a time while the loss is computed; null: 4096 on a GPU, 512 on a CPU."""
    anomaly: bool = False
    """Stop at the operation that made a gradient NaN, with the place in the forward pass it belongs to; slow."""

    def problems(self) -> Iterator[str]:
        """What cannot work in the engine's settings."""
        wrong = problem("engine.name", self.name, ENGINES)
        if wrong:
            yield wrong
        yield from at_least(1, "engine", recompute_every=self.recompute_every, loss_chunk=self.loss_chunk)
        if self.zero_stage is not None and not 0 <= self.zero_stage <= 3:
            yield f"engine.zero_stage={self.zero_stage} must be 0, 1, 2 or 3"
        if self.bucket_mb is not None and not (self.bucket_mb > 0 and math.isfinite(self.bucket_mb)):
            yield f"engine.bucket_mb={self.bucket_mb} must be more than 0"
        if self.offload_folder and self.offload == "none":
            yield f"engine.offload_folder={self.offload_folder} has no effect with engine.offload=none"
        if self.anomaly and self.precision == "fp16":
            yield "engine.anomaly=true looks for no NaN with engine.precision=fp16, whose overflows the loss scale answers; use bf16"
        if self.anomaly and self.compile:
            yield "engine.anomaly=true finds nothing inside compiled blocks; set engine.compile=false"
        if self.recompute_every > 1 and self.recompute != "full":
            yield f"engine.recompute_every={self.recompute_every} has no effect with engine.recompute={self.recompute}"

    def problems_without_gpu(self) -> Iterator[str]:
        """What cannot work where training would be on the CPU."""
        if self.device == "cuda":
            yield "engine.device=cuda, but PyTorch sees no GPU here; use engine.device=cpu or auto"
        if self.offload_activations:
            yield (
                "engine.offload_activations=true keeps activations of a GPU in the CPU's memory, and this run computes on the "
                "CPU, where they are already; leave it out, or use engine.recompute=full to keep fewer"
            )

    def chosen(self) -> dict[str, object]:
        """The settings that differ from their defaults."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in mine.items() if value != getattr(EngineConfig(), name)}
