"""Bytes per parameter that an engine keeps and sends: the parameters of the formulas in ``memory`` and `time`."""

from dataclasses import dataclass, field, replace

from hpclm.config import EngineConfig, OptimConfig, ParallelConfig
from hpclm.config.supports import SUPPORTS
from hpclm.parallel.placement import Placement
from hpclm.planning import optimizer

HIDDEN = Placement((2, 2))
"""An example of a weight, to look up an optimizer's state of such weights."""
EMBEDDING = Placement((2, 2), use="embedding")
EXPERTS = Placement((2, 2, 2), stacked=True)


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes per parameter: replicated, and sharded over replicas."""

    replicated: float = 0.0
    sharded: float = 0.0

    def on(self, replicas: int) -> float:
        """Bytes per parameter on one GPU, sharded over this number of replicas."""
        return self.replicated + self.sharded / replicas


@dataclass(frozen=True)
class EngineCosts:
    """Costs of an engine; the defaults are those of the native engine in bf16 at ZeRO stage 0."""

    weights: BytesPerParameter = BytesPerParameter(4)
    frozen: BytesPerParameter = BytesPerParameter(4)
    """Of weights that model.freeze matches, in place of weights, gradients and optimizer."""
    gradients: BytesPerParameter = BytesPerParameter(4)
    optimizer: BytesPerParameter = BytesPerParameter(8)
    """The optimizer's state, and the average of the weights."""
    outside: float = 0.0
    """Extra bytes of optimizer state per parameter outside the blocks, relative to one inside; sharded with ZeRO."""
    of_experts: float = 0.0
    """The same per parameter of experts."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer, which may keep state that is not divided like the weights."""
    gathered: BytesPerParameter = BytesPerParameter(2)
    """Copies of the weights in the compute type. ``replicated``: for the whole stage. ``sharded``: for layers other than blocks, and for
    one block at a time (two in the backward pass)."""
    kept: float = 0
    """Sharded parameters, the last of a stage, that stay gathered from the forward to the backward pass."""
    casts: int = 0
    """Bytes per parameter of the casts that a block's forward pass saves for the backward pass."""
    working: float = 0
    """Bytes per parameter of a block for its gradients in the backward pass, before they are reduced."""
    buckets: float = 0
    """Bytes of communication buffers."""
    element: int = 2
    """Bytes of an activation."""
    compiled: bool = False
    """Whether blocks are compiled."""
    fp8: bool = False
    """Whether linear layers multiply in FP8."""
    staged: bool = False
    """Whether a pipeline stage keeps its outputs, and has a receive buffer for each micro-batch of a step."""
    loss_chunk: int | None = None
    """Tokens with logits in memory at a time; None: the number that a GPU with ``memory`` bytes chooses."""
    memory: float = 0
    logit: int = 10
    """Bytes per logit: the logit, log-probabilities and gradient."""
    table: int = 2
    """Bytes per element of the embedding that the loss needs besides weights and gradients."""
    table_at_once: int = 0
    """See ``table``; for a loss that holds all logits of a micro-batch at once."""
    zero: int = 0
    """ZeRO stage."""
    reduced: int = 4
    """Bytes per gradient in data-parallel communication."""
    all_reduced: bool = False
    """Whether gradients are all-reduced, although ZeRO only needs a reduce-scatter."""
    sent: int = 0
    """Bytes per weight in data-parallel communication."""
    gathers: int = 0
    """Number of times a micro-batch gathers the blocks; 0: weights are gathered once a step."""
    deferred: bool = False
    """Whether gradients are reduced once a step at any ZeRO stage."""
    overlap: bool = True
    """Whether data-parallel communication overlaps with the backward pass (with ZeRO stage 3 also with the forward pass)."""


def costs(
    engine: EngineConfig, element: int, parallel: ParallelConfig, optim: OptimConfig | None = None
) -> EngineCosts:
    """The costs of an engine, with activations of ``element`` bytes; a user-defined engine is treated as native."""
    cast = element if element < 4 else 0
    in_place = bool(cast) and not engine.offload_activations
    """Whether products accumulate into the fp32 gradients, so that the embedding needs no gradient per micro-batch."""
    optim = optim or OptimConfig()
    kind = optimizer.kind(optim)
    of_block = kind.bytes_per_parameter(HIDDEN)
    # a compiled loss computes the gradient of unsplit logits in one pass; other losses also store log-probabilities in fp32
    if engine.compile:
        logit = 2 * element + (4 if parallel.tensor > 1 else 0)
    else:
        logit = 8 + (cast if parallel.tensor == 1 else 0)
    common = EngineCosts(
        optimizer=BytesPerParameter(of_block if optim.ema is None else of_block + 4),
        outside=kind.bytes_per_parameter(EMBEDDING) - of_block,
        of_experts=kind.bytes_per_parameter(EXPERTS) - of_block,
        optim=optim,
        gathered=BytesPerParameter(cast),
        element=element,
        compiled=bool(engine.compile),
        fp8=bool(engine.fp8),
        loss_chunk=engine.loss_chunk,
        logit=logit,
        table=cast if in_place else 8 - cast,
        zero=zero_stage(engine, parallel.pipeline),
        reduced=4 if engine.gradients != "compute" else element,
    )
    return ENGINES.get(engine.name, _native)(engine, common, parallel.pipeline)


def zero_stage(engine: EngineConfig, pipeline: int) -> int:
    """The ZeRO stage in use: the setting, or the engine's default."""
    if engine.zero_stage is not None:
        return engine.zero_stage
    can = SUPPORTS.get(engine.name, SUPPORTS["native"])
    return next(iter(can.stages(pipeline)), 0)


def _native(engine: EngineConfig, common: EngineCosts, pipeline: int) -> EngineCosts:
    """16 bytes per parameter (fp32 weight, gradient, Adam's two moments), and a copy of the weights in the compute type. Stage 1 shards
    the moments, and the fp32 weights if the model computes with copies."""
    if common.zero == 0:
        return common
    masters = BytesPerParameter(0, 4) if common.element < 4 else BytesPerParameter(4)
    moments = BytesPerParameter(0, common.optimizer.replicated)
    return replace(common, weights=masters, optimizer=moments, sent=common.element)


def _pipelining(engine: EngineConfig, common: EngineCosts, pipeline: int) -> EngineCosts:
    """16 bytes per parameter as in native PyTorch, and casts, in stages of torch.distributed.pipelining. Stage 1 shards the moments."""
    cast = common.element if common.element < 4 else 0
    if common.zero == 1:
        common = replace(common, optimizer=BytesPerParameter(0, common.optimizer.replicated), sent=4)
    return replace(common, gathered=BytesPerParameter(), casts=cast, table=8, staged=True)


def _sharded(engine: EngineConfig, common: EngineCosts, pipeline: int) -> EngineCosts:
    """16 bytes per parameter, sharded, with weights gathered in the compute type (Rajbhandari et al. 2020, section 5)."""
    element = common.element
    kept = common.zero == 2
    reduced = element if engine.gradients == "auto" and engine.name == "fairscale" else common.reduced
    return replace(
        common,
        weights=BytesPerParameter(0, 4),
        frozen=BytesPerParameter(0, 4),
        gradients=BytesPerParameter(0, 4),
        optimizer=BytesPerParameter(0, common.optimizer.replicated),
        gathered=BytesPerParameter(element) if kept else BytesPerParameter(0, element),
        working=reduced,
        table=8 - element,
        table_at_once=element,
        reduced=reduced,
        sent=element,
        gathers=0 if kept else 2,
        deferred=engine.defer_reduction,
    )


def _deepspeed(engine: EngineConfig, common: EngineCosts, pipeline: int) -> EngineCosts:
    """K = 12 bytes of optimizer state (fp32 weight and two moments), 2 of gradients and 2 of weights. Stage 1 shards K, stage 2 also the
    gradients, stage 3 everything (Rajbhandari et al. 2020, section 5). Stage 0 is hpclm's own optimizer."""
    element = common.element
    stage = common.zero
    if stage == 0:
        return replace(_pipelining(engine, common, pipeline), staged=False, overlap=False)
    fp32 = engine.gradients == "fp32"  # fp32 gradients come on top of the gradients in the compute type
    whole = BytesPerParameter(element + 4 * fp32)
    on_cpu = engine.offload != "none"
    # pipelines, and stage 1 in bf16 with gradients in fp32, use DeepSpeed's BF16_Optimizer, which all-reduces without
    # buckets
    simple = pipeline > 1 or (stage == 1 and fp32 and element == 2 and engine.precision != "fp16" and not on_cpu)
    reduced = 4 if fp32 else element
    weights = BytesPerParameter(element)
    gradients = BytesPerParameter(0, 4)
    optim = BytesPerParameter(0, 4 + common.optimizer.replicated)
    frozen = BytesPerParameter(0, 4) if stage == 3 else BytesPerParameter(4)
    bucket = 5e8 * reduced
    buckets = 2  # stages 1 and 2 fill one while they send the other
    if stage == 3:
        weights = BytesPerParameter(0, element)
        buckets = 1
    if engine.offload == "parameters":
        weights = frozen = BytesPerParameter()
    if on_cpu:
        gradients = BytesPerParameter(0, element)
        optim = BytesPerParameter()
        common = replace(common, outside=0.0, of_experts=0.0)
    if stage == 1:
        gradients = whole
    if engine.bucket_mb:
        bucket = engine.bucket_mb * 2**20
    if simple:
        buckets = 0
    return replace(
        common,
        weights=weights,
        frozen=frozen,
        gradients=gradients,
        optimizer=optim,
        gathered=BytesPerParameter(0, element if stage == 3 else 0),
        kept=5e8,  # stage 3 keeps parameters that are needed again before 1e9 others are
        buckets=bucket * buckets,
        table=8 - element,
        table_at_once=8 - element,
        reduced=reduced,
        all_reduced=stage < 3,
        sent=element,
        gathers=2 if stage == 3 else 0,
    )


ENGINES = {"pipelining": _pipelining, "fsdp2": _sharded, "fairscale": _sharded, "deepspeed": _deepspeed}
