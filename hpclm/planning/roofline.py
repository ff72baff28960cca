"""Seconds of a traced step on a kind of GPU: each kernel takes as long as its arithmetic or its memory traffic.

The rates are parts of the GPU's figures that large kernels reach in practice. Expect 15% in either direction.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from hpclm.config import ModelConfig, RunConfig
from hpclm.model import count
from hpclm.node.gpus import Kind
from hpclm.planning.fusion import Kernel


@dataclass(frozen=True)
class Rates:
    """What a generation of GPUs reaches."""

    product: float
    """Part of the peak that matrix products reach with a large inner size."""
    attention: Mapping[int, tuple[float, float]]
    """Parts of the peak of attention's forward and backward pass, by the size of a head; masked blocks are skipped."""
    inner: int = 180
    """Inner size of a product that halves the rate: it takes this many steps to fill the pipeline."""
    memory: float = 0.88
    """Part of the memory bandwidth."""
    processors: int = 132
    """Streaming multiprocessors."""
    tile: tuple[int, int] = (128, 256)
    """Rows and columns of a product that one of them computes at a time."""
    split: float = 0.8
    """Part of the rate of products with fewer tiles than processors, which are split along the inner size."""
    kernel: float = 2e-6
    """Seconds that a kernel takes at least."""
    host: float = 5e-6
    """Seconds that the host needs to launch a kernel."""
    link: float = 0.8
    """Part of the links' bandwidth that collectives reach."""


HOPPER = Rates(0.708, {64: (0.334, 0.263), 128: (0.526, 0.425)})
AMPERE = Rates(0.85, {64: (0.58, 0.48), 128: (0.68, 0.58)}, processors=108, tile=(128, 128))
RATES = {"Hopper": HOPPER, "Ampere": AMPERE, "Blackwell": HOPPER, "Ada": AMPERE, "Volta": AMPERE}
"""Assumed, not measured by hpclm: rates that others report, of cuDNN's attention on Hopper and of FlashAttention 2 on Ampere (Dao
2023). Other generations take those of the nearest one."""


def seconds(kernel: Kernel, gpu: Kind) -> float:
    """One run of a kernel."""
    rates = RATES[gpu.family]
    moving = kernel.bytes / (gpu.bandwidth * rates.memory)
    if kernel.kind == "collective":
        return 0.0 if kernel.operation.on_host else kernel.read / (gpu.link * rates.link)
    return max(moving, _computing(kernel, gpu, rates), rates.kernel * kernel.launches)


def _computing(kernel: Kernel, gpu: Kind, rates: Rates) -> float:
    cost = kernel.operation.cost
    if kernel.kind == "product" and cost.shape:
        batch, rows, columns, inner = cost.shape
        tiles = batch * ceil(rows / rates.tile[0]) * ceil(columns / rates.tile[1])
        waves = ceil(tiles / rates.processors)
        busy = tiles / (waves * rates.processors) if waves > 1 else rates.split
        return kernel.flops / (gpu.peak * rates.product / (1 + rates.inner / inner) * busy)
    if kernel.kind == "attention":
        nearest = min(rates.attention, key=lambda width: abs(width - cost.width))
        forward, backward = rates.attention[nearest]
        return kernel.flops / (gpu.peak * (backward if "backward" in kernel.name else forward))
    return 0.0


@dataclass(frozen=True)
class Times:
    """Seconds of an optimizer step on one GPU, without communication among replicas, which overlaps."""

    products: float
    attention: float
    memory: float
    """Everything else on the device."""
    tensor: float
    """Collectives over the tensor axis, for which the matrix products wait."""
    least: float
    """What ``memory`` would be with ideal fusion."""
    host: float
    """Launching all kernels, while the device works."""
    replicas: float
    """Collectives over other axes, which may overlap."""

    @property
    def total(self) -> float:
        """The device's work, or the host's if that takes longer."""
        return max(self.limit + self.memory + self.tensor, self.host)

    @property
    def ideal(self) -> float:
        """With ideal fusion."""
        return self.limit + self.least + self.tensor

    @property
    def limit(self) -> float:
        """Matrix products and attention alone."""
        return self.products + self.attention


def times(kernels: Iterable[Kernel], run: RunConfig, replicas: int, micro_batches: int, gpu: Kind) -> Times:
    """The seconds of a step of these kernels."""
    by_kind = dict.fromkeys(("product", "attention", "memory", "tensor", "replicas"), 0.0)
    launches = 0
    for kernel in kernels:
        kind = kernel.kind
        if kind == "collective":
            kind = "tensor" if kernel.operation.group == "tensor" else "replicas"
        by_kind[kind] += seconds(kernel, gpu) * kernel.count
        launches += kernel.launches * kernel.count
    rates = RATES[gpu.family]
    least = sum(least_bytes(run, replicas, micro_batches).values()) / (gpu.bandwidth * rates.memory)
    return Times(
        by_kind["product"], by_kind["attention"], by_kind["memory"], by_kind["tensor"], least, launches * rates.host,
        by_kind["replicas"],
    )  # fmt: skip


def least_bytes(run: RunConfig, replicas: int, micro_batches: int) -> dict[str, float]:
    """Bytes that a GPU must move in a step besides matrix products and attention, by part, without a pipeline.

    Everything between two products is one pass over memory; sums of bias gradients and the accumulation of weight gradients
    happen in the product that makes them, attention reads the products' layout, weights are cast once a step. Attention's kernels
    return three gradients, which are copied once into the layout of one product; where positions rotate queries and keys, the
    gradient of that writes them there, and only the values' is copied.
    """
    model, engine, split = run.model, run.engine, run.parallel.tensor
    tokens = micro_batches * run.batch.micro_size * model.context
    element = 4 if engine.precision == "fp32" else 2
    again = 1 + (engine.recompute == "full")
    c, f, keys = model.hidden, model.ffn_width, model.groups * model.head_width
    n, layers = tokens * element / split, model.layers
    norms = (4 * again + 4) * (2 * layers) + 8  # residual, its addition and norm: two values in, two out
    inner = (3 * again + 5 if model.gated else 2 * again + 3) * layers
    rotates = model.positions == "rope" or model.qk_norm
    rotated = (c + keys) * (2 * again + 2 + model.qk_norm) * layers * rotates
    joined = (2 * keys if rotates else 2 * (c + 2 * keys)) * layers
    parameters = count.parameters(model) / split
    sharded = replicas if engine.zero_stage or engine.name not in ("native", "pipelining") else 1
    return {
        "norms and residual": n * c * norms,
        "activation": n * f * inner,
        "positions": n * rotated,
        "attention's layout": n * joined,
        "embeddings": n * c * 3 + tokens / split * c * 8,  # rows of the table in fp32, and of its gradient
        "loss": n * model.padded_vocab * 2,
        "optimizer": parameters * (28 + 4 + element * (element < 4)) / sharded,
    }


def moved(kernels: Iterable[Kernel]) -> float:
    """Bytes of a step that belong to no matrix product, attention or collective."""
    return sum(kernel.bytes * kernel.count for kernel in kernels if kernel.kind == "memory")


def utilization(model: ModelConfig, tokens_per_second: float, gpu: Kind) -> float:
    """Model FLOPs utilisation, with all of attention counted: 6 N + 12 layers x hidden x context FLOPs a token."""
    return tokens_per_second * count.flops_per_token(model, causal=False) / gpu.peak
