"""How a training code stores its state and computes: the parameters of the formulas, for hpclm's engines and other codes."""

from dataclasses import dataclass, replace

from hpclm.config import EngineConfig
from hpclm.config.supports import SUPPORTS
from hpclm.optim.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes per parameter: replicated, and sharded over replicas."""

    replicated: float = 0.0
    sharded: float = 0.0

    def split(self) -> "BytesPerParameter":
        """The same, all of it sharded."""
        return BytesPerParameter(0, self.replicated + self.sharded)

    def on(self, replicas: int) -> float:
        """Bytes per parameter on one GPU, sharded over this number of replicas."""
        return self.replicated + self.sharded / replicas


@dataclass(frozen=True)
class Code:
    """A training code. The defaults are hpclm's native engine in bf16."""

    weights: BytesPerParameter = BytesPerParameter(4)
    gradients: BytesPerParameter = BytesPerParameter(4)
    optimizer: BytesPerParameter = BytesPerParameter(8)
    gathered: BytesPerParameter = BytesPerParameter()
    """Bytes per parameter of copies and gathered weights: ``replicated`` for the whole stage; ``sharded`` for layers other than
    blocks, and for one block at a time, in the backward pass two."""
    working: float = 0
    """Bytes per parameter of a block for its gradients in the backward pass, before they are reduced."""
    buckets: float = 0
    """Bytes of communication buffers in the backward pass."""
    flattened: int = 0
    """Bytes per parameter of a copy of all gradients in one piece, which is reduced after the backward pass."""
    buckets_kept: bool = False
    """Whether those are there in later forward passes too."""
    element: int = 2
    """Bytes of an activation."""
    casts: int = 2
    """Bytes per parameter of the casts that a block's forward pass saves for the backward pass."""
    flash: bool = True
    """FlashAttention: no stored scores, and masked blocks are skipped (Dao et al. 2022)."""
    sequence: bool = True
    """Sequence parallelism: activations between layers are split too (Korthikanti et al. 2022)."""
    mask: int = 1
    """Bytes per element of a dropout mask."""
    outputs: bool = False
    """Whether a pipeline stage keeps its output until the backward pass of the micro-batch."""
    received: bool = False
    """Whether a pipeline stage has a buffer for what it receives of each micro-batch of a step."""
    fresh_tables: bool = False
    """Whether a single replica allocates the gradient of an embedding in each step."""
    rows: int | None = 4096
    """Tokens whose logits exist at a time; None: all of a micro-batch."""
    memory: float = 0
    """Bytes of memory of the GPU, if hpclm chooses the tokens by it; 0: it does not."""
    logit: int = 4
    """Bytes per logit, including temporaries of the loss: the logit and its gradient. With several chunks, the last one's gradient too."""
    split_logit: int | None = None
    """The same where tensor-parallel ranks split the vocabulary; None: no difference."""
    table: int = 8
    """Bytes per element of the embedding that the loss needs besides weights and gradients: its fp32 gradient, and in the compute
    type its rows and the gradient of one chunk."""
    table_at_once: int | None = None
    """The same where the loss has all tokens in one chunk; None: no difference."""
    table_kept: int = 4
    """Of those, bytes that a tied embedding keeps until the end of the backward pass."""
    fixed: float = 3 * 2**30
    """Bytes of a process other than tensors: CUDA context, NCCL buffers, libraries."""
    slack: float = 0.13
    """Overhead of the allocator, as a fraction of the tensors."""
    zero: int = 0
    """ZeRO stage."""
    reduced: int = 4
    """Bytes per gradient in data-parallel communication."""
    all_reduced: bool = False
    """Gradients are all-reduced, although ZeRO needs only to reduce-scatter them."""
    sent: int = 0
    """Bytes per weight in data-parallel communication."""
    sent_table: int = 0
    """Bytes per element of an embedding in addition."""
    gathers: int | None = None
    """How often a micro-batch gathers the blocks; 0: weights are gathered once a step; None: twice with ZeRO stage 3."""
    deferred: bool = False
    """Gradients are reduced once a step whatever the ZeRO stage is."""
    overlap: bool = True
    """Data-parallel communication overlaps with the backward pass (with ZeRO stage 3 also with the forward pass)."""
    overlap_tensor: bool = False
    """Tensor-parallel communication overlaps with matrix products."""
    touched: int = 26
    """Bytes per parameter of memory traffic per micro-batch, besides activations: casts, products, accumulation."""
    kernel: float = 1.0
    """Speed of the attention kernel relative to FlashAttention-2."""


def of(engine: EngineConfig, element: int, pipeline: int, optimizer: str = "adamw") -> Code:
    """hpclm's own engines, with activations of ``element`` bytes; a user-defined engine is treated as native."""
    state = BytesPerParameter(OPTIMIZERS[optimizer].bytes_per_parameter)
    stage = zero_stage(engine, pipeline)
    # compiled, the loss makes the gradient of the logits in one pass; otherwise log-probabilities in fp32 too
    logit = 2 * element if engine.compile else 8 + element * (element < 4)
    rows = engine.loss_chunk or 4096
    common = Code(optimizer=state, element=element, rows=rows, zero=stage, overlap=True, logit=logit)
    common = replace(common, split_logit=logit if engine.compile else 8)
    return CODES.get(engine.name, plain)(engine, common, pipeline)


def plain(engine: EngineConfig, common: Code, pipeline: int) -> Code:
    """16 bytes per parameter (fp32 weight, gradient, Adam's two moments), plus casts."""
    cast = common.element if common.element < 4 else 0
    return replace(common, casts=cast, reduced=4, touched=26 if cast else 16)


def sent(engine: EngineConfig, common: Code) -> int:
    """Bytes per gradient that replicas send each other."""
    small = {"auto": engine.name == "fairscale", "compute": True, "fp32": False}
    return common.element if small[engine.gradients] else 4


def native(engine: EngineConfig, common: Code, pipeline: int) -> Code:
    """The same 16 bytes, and a copy of the weights in the compute type that is made once a step; stage 1 shards the optimizer."""
    cast = common.element if common.element < 4 else 0
    in_place = bool(cast) and not engine.offload_activations
    """Whether products add to the fp32 gradients; the embedding then needs only memory for a gradient that is not filled."""
    own = replace(
        common,
        casts=0,
        gathered=BytesPerParameter(cast),
        table=cast if in_place else common.table - cast,
        reduced=sent(engine, common),
        touched=12 if in_place else 16,
        table_kept=0 if in_place else common.table_kept,
        fresh_tables=bool(cast) and not in_place,
    )
    if common.zero == 0:
        return own
    # stage 1 shards the moments, and the fp32 weights if the model computes with copies
    masters = BytesPerParameter(0, 4) if cast else BytesPerParameter(4)
    whole = 4 * (bool(cast) and not in_place)  # else the embedding is also read in fp32
    return replace(
        own, weights=masters, optimizer=own.optimizer.split(), table=own.table + whole, table_kept=own.table_kept + whole,
        sent=common.element, sent_table=whole and 4 - common.element,
    )  # fmt: skip


def pipelining(engine: EngineConfig, common: Code, pipeline: int) -> Code:
    """The same, in stages of torch.distributed.pipelining."""
    return replace(plain(engine, common, pipeline), outputs=True, received=True)


def sharded(engine: EngineConfig, common: Code, pipeline: int) -> Code:
    """The same 16 bytes sharded, with weights gathered in the compute type (Rajbhandari et al. 2020, section 5)."""
    reduced = sent(engine, common)
    kept = common.zero == 2
    return replace(
        common,
        weights=BytesPerParameter(0, 4),
        gradients=BytesPerParameter(0, 4),
        optimizer=common.optimizer.split(),
        gathered=BytesPerParameter(common.element) if kept else BytesPerParameter(0, common.element),
        working=reduced,
        table=common.table - common.element,
        table_at_once=common.element,  # the gradient needs no fp32 sum of chunks
        table_kept=common.element,
        casts=0,
        reduced=reduced,
        sent=common.element,
        gathers=0 if kept else 2,
        deferred=engine.defer_reduction,
        touched=20,
    )


def deepspeed(engine: EngineConfig, common: Code, pipeline: int) -> Code:
    """Of K = 12 bytes of optimizer (fp32 weight and two moments), 2 of gradients and 2 of weights, stage 1 shards K,
    stage 2 also the gradients, stage 3 everything (Rajbhandari et al. 2020, section 5). Stage 0 is hpclm's own optimizer."""
    if common.zero == 0:
        return replace(plain(engine, common, pipeline), overlap=False)
    kept = _deepspeed(engine, common.element, common.zero, 4 + common.optimizer.replicated)
    if pipeline > 1:
        kept |= dict(buckets=0, flattened=4 if engine.gradients == "fp32" else common.element)
    reduced = 4 if engine.gradients == "fp32" else common.element
    return replace(
        common,
        **kept,  # type: ignore[arg-type]
        casts=0,
        table=common.table - common.element,
        reduced=reduced,
        all_reduced=pipeline > 1,
        sent=common.element,
        touched=14,
    )


CODES = {"native": native, "pipelining": pipelining, "fsdp2": sharded, "fairscale": sharded, "deepspeed": deepspeed}


def zero_stage(engine: EngineConfig, pipeline: int) -> int:
    """The ZeRO stage in use: as set, or the engine's default."""
    if engine.zero_stage is not None:
        return engine.zero_stage
    can = SUPPORTS.get(engine.name, SUPPORTS["native"])
    return ((can.pipeline_stages if pipeline > 1 else can.zero_stages) or (0,))[0]


BUCKET = 5e8
"""Gradients in one of DeepSpeed's buckets, unless engine.bucket_mb says otherwise."""


def _deepspeed(engine: EngineConfig, element: int, stage: int, state: float) -> dict[str, object]:
    """Weights in the compute type, and ``state``: an fp32 copy of each, and what the optimizer keeps; gradients are cast to fp32
    for the update."""
    accumulated = 4 if engine.gradients == "fp32" else 0  # in addition to those in the compute type
    gradients = BytesPerParameter(element + accumulated) if stage == 1 else BytesPerParameter(0, 4)
    weights = BytesPerParameter(0, element) if stage == 3 else BytesPerParameter(element)
    optimizer = BytesPerParameter(0, state)
    gathered = BytesPerParameter(0, element) if stage == 3 else BytesPerParameter()
    if engine.offload != "none":  # the update runs in CPU memory, with its fp32 state
        optimizer, gradients = (
            BytesPerParameter(),
            BytesPerParameter(0, element) if stage >= 2 else BytesPerParameter(element + accumulated),
        )
    if engine.offload == "parameters":
        weights = BytesPerParameter()
    bucket = engine.bucket_mb * 2**20 if engine.bucket_mb else BUCKET * (accumulated or element)
    buckets = 2 * bucket
    return dict(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        buckets=buckets,
        buckets_kept=stage == 1,
    )
