"""How a training code keeps what it trains and how it computes: what the same formulas must know of hpclm or of another."""

from dataclasses import dataclass, replace

from hpclm.config import EngineConfig
from hpclm.config.supports import SUPPORTS


@dataclass(frozen=True)
class Kept:
    """Bytes a parameter: on every replica, and divided among the replicas."""

    whole: float = 0.0
    shared: float = 0.0

    def on(self, replicas: int) -> float:
        """Bytes a parameter on one GPU."""
        return self.whole + self.shared / replicas


@dataclass(frozen=True)
class Code:
    """A training code. The defaults are hpclm's native engine in bf16."""

    weights: Kept = Kept(4)
    gradients: Kept = Kept(4)
    optimizer: Kept = Kept(8)
    gathered: Kept = Kept()
    """Bytes a parameter of weights that are brought together for use: ``whole`` of the whole stage, ``shared`` of two
    blocks at a time."""
    element: int = 2
    """Bytes of an activation."""
    casts: int = 2
    """Bytes a parameter that a block's forward pass makes of its matrices and keeps for the backward pass."""
    flash: bool = True
    """Attention without stored scores (Dao et al. 2022), which skips what the causal mask hides."""
    sequence: bool = True
    """Tensor-parallel ranks share what lies between layers, too (Korthikanti et al. 2022)."""
    mask: int = 1
    """Bytes of an entry of a dropout mask."""
    outputs: bool = False
    """A pipeline stage keeps what it sent on until that micro-batch's backward pass."""
    rows: int | None = 4096
    """Rows (tokens) of logits that exist at a time; None: all of a micro-batch."""
    logit: int = 8
    """Bytes of a logit and of what is made of it while the loss is computed."""
    table: int = 8
    """Bytes an entry of the token table that the loss holds beside weights and gradients: its gradient in fp32, and in the
    compute type its rows and a chunk's part of the gradient."""
    fixed: float = 3 * 2**30
    """Bytes of a process that are no tensor: CUDA's context, NCCL's buffers, libraries."""
    slack: float = 0.15
    """Part of the tensors' bytes that the allocator holds beside them."""
    zero: int = 0
    """ZeRO stage."""
    reduced: int = 4
    """Bytes of a gradient on its way to the other replicas."""
    sent: int = 0
    """Bytes of a weight on its way to the other replicas."""
    overlap: bool = True
    """Data-parallel communication goes on during the backward pass (with ZeRO stage 3 during all of it)."""
    overlap_tensor: bool = False
    """Tensor-parallel communication goes on during the products."""
    touched: int = 26
    """Bytes a parameter that a micro-batch reads and writes beside its activations: casts, products, accumulation."""
    kernel: float = 1.0
    """Speed of the flash kernel, as part of FlashAttention-2's."""


def of(engine: EngineConfig, element: int, pipeline: int) -> Code:
    """hpclm's own engines, with activations of ``element`` bytes; one of a person's own is taken for native."""
    stage = zero_stage(engine, pipeline)
    common = Code(element=element, rows=engine.loss_chunk or 4096, zero=stage, overlap=engine.overlap)
    return CODES.get(engine.name, plain)(engine, common)


def plain(engine: EngineConfig, common: Code) -> Code:
    """16 bytes a parameter (fp32 weight, gradient, Adam's two moments), and casts on the way."""
    cast = common.element if common.element < 4 else 0
    return replace(common, casts=cast, reduced=4, touched=26 if cast else 16)


def sharded(engine: EngineConfig, common: Code) -> Code:
    """The same 16 bytes shared out, and weights gathered in the compute type (Rajbhandari et al. 2020, section 5)."""
    return replace(
        common,
        weights=Kept(0, 4),
        gradients=Kept(0, 4),
        optimizer=Kept(0, 8),
        gathered=Kept(0, common.element) if common.zero == 3 else Kept(common.element),
        casts=0,
        reduced=4 if engine.gradients == "fp32" else common.element,
        sent=common.element,
        touched=20,
    )


def deepspeed(engine: EngineConfig, common: Code) -> Code:
    """Of K = 12 bytes of optimizer (fp32 weight and two moments), 2 of gradients and 2 of weights, stage 1 shares out K,
    stage 2 the gradients too, stage 3 all (Rajbhandari et al. 2020, section 5)."""
    kept = _deepspeed(engine, common.element, common.zero)
    reduced = 4 if engine.gradients == "fp32" else common.element
    return replace(common, **kept, casts=0, reduced=reduced, sent=common.element, touched=14)  # type: ignore[arg-type]


CODES = {"native": plain, "pipelining": plain, "fsdp2": sharded, "fairscale": sharded, "deepspeed": deepspeed}


def zero_stage(engine: EngineConfig, pipeline: int) -> int:
    """The ZeRO stage in use: the one set, or the engine's own."""
    if engine.zero_stage is not None:
        return engine.zero_stage
    can = SUPPORTS.get(engine.name, SUPPORTS["native"])
    return ((can.pipeline_stages if pipeline > 1 else can.zero_stages) or (0,))[0]


def _deepspeed(engine: EngineConfig, element: int, stage: int) -> dict[str, Kept]:
    """Weights in the compute type, and an fp32 copy of each with its moments; a gradient becomes fp32 for the update."""
    accumulated = 4 if engine.gradients == "fp32" else 0  # beside those in the compute type
    gradients = {0: Kept(element + 4), 1: Kept(element + accumulated, 4 - accumulated)}.get(stage, Kept(0, element + 4))
    weights = Kept(0, element) if stage == 3 else Kept(element)
    optimizer = Kept(0, 12) if stage else Kept(12)
    gathered = Kept(0, element) if stage == 3 else Kept()
    if engine.offload != "none":  # the update, with its fp32, is made in the CPU's memory
        optimizer, gradients = Kept(), Kept(0, element) if stage >= 2 else Kept(element + accumulated)
    if engine.offload == "parameters":
        weights = Kept()
    return dict(weights=weights, gradients=gradients, optimizer=optimizer, gathered=gathered)
