"""Time of an optimizer step, in seconds: matrix products, memory traffic and communication, in sequence unless they overlap.

T = tokens of a sample, C hidden width, t tensor-parallel ranks, m micro-batches of a step, p pipeline stages, v chunks of a stage, k
experts per token. Experts are assumed to have equal loads, and to multiply as fast as other layers.
"""

from dataclasses import dataclass, fields

from hpclm.config import ModelConfig
from hpclm.config.layer import Layer
from hpclm.model import count
from hpclm.node.gpus import Kind
from hpclm.planning.engines import EngineCosts
from hpclm.planning.layout import Layout, Stage, block, experts, outside_experts, parameters, stages
from hpclm.planning.matrices import exchange
from hpclm.planning.memory import block_activations, expert_rows

EFFICIENCY = {"Ampere": 0.67, "Hopper": 0.56}
"""Fraction of the peak that matrix products reach: one constant a generation, fitted to published runs (docs/planner.md)."""
UNMEASURED = 0.56
"""Fraction of the peak for generations without published runs to fit."""
ATTENTION = {"Ampere": 0.55, "Hopper": 0.33}
"""Fraction of the peak that FlashAttention-2 reaches, forward and backward, causal (Dao 2023, section 4.1)."""
ACHIEVED = 0.8
"""Fraction of a link's nominal rate that collectives reach."""
TRAFFIC = 2.4
"""Memory traffic of one pass of a block, relative to the bytes that the block saves for the backward pass. Each operand is read or
written once."""
QUANTIZING = 5
"""Bytes of traffic per element converted to FP8: read for the maximum (2), read again (2), written (1)."""
WEIGHT_TRAFFIC = 18
"""Bytes per parameter and micro-batch: products, casts, accumulation."""
UPDATE_TRAFFIC = 28
"""Bytes per parameter of an update in fp32: reads w, g, m and v, writes w, m and v. An average of the weights has at most as much."""
WAIT = 1e-4
"""Seconds that the host waits, in each layer with experts, for the number of rows to send. They include a small all-to-all, a copy to
the host, and launches until the GPU is busy again. This is an assumption, not a measurement."""
EXPOSED = 0.1
"""Fraction of overlapped communication that still costs time, fitted to published multi-node runs."""


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step by cause; ``total`` is their sum."""

    compute: float
    """Matrix products and memory traffic of the slowest stage."""
    tensor: float
    """Gathers and scatters between tensor-parallel ranks."""
    context: float
    """Keys and values, and their gradients, between context-parallel ranks."""
    expert: float
    """Exchange of rows, and their gradients, with the experts of other ranks."""
    waits: float
    """Waits of the host for the number of rows per expert."""
    bubble: float
    """Waiting while the pipeline fills and drains."""
    pipeline: float
    """Sending activations and their gradients between stages."""
    data: float
    """The part of the communication of gradients and weights between replicas that computation does not hide. With hybrid sharding: only
    between replicas that divide the weights."""
    replicate: float
    """Communication, not hidden by computation, between replicas with the same shard."""
    optimizer: float
    """The update, including work on whole matrices and their exchange."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Volume:
    """Bytes that one GPU sends in a step along each axis."""

    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float
    """To replicas; with hybrid sharding, only to replicas that divide the weights."""
    replicate: float
    """To replicas with the same shard."""


def idle(layout: Layout) -> float:
    """The waiting time of a pipeline while it fills and drains, in micro-batches: p - 1 over v chunks (Narayanan et al. 2021, section 2.2).

    A zero-bubble schedule (ZB-H1 of Qi et al. 2023) fills two thirds of this time with gradients of weights.
    """
    unfilled = 1 / 3 if layout.schedule == "zero_bubble" else 1.0
    return (layout.pipeline - 1) * unfilled / layout.chunks


def bubble(layout: Layout) -> float:
    """Fraction of a step that a pipeline of equal stages is idle: (p - 1) / (v m + p - 1)."""
    return idle(layout) / (layout.accumulation + idle(layout))


def volumes(model: ModelConfig, layout: Layout, costs: EngineCosts) -> list[Volume]:
    """Bytes that one GPU of each stage sends in a step.

    tensor: a layer gathers and scatters its activations 4 times in the forward pass and 6 times in the backward pass, 2 of them because
    of sequence parallelism (Korthikanti et al. 2022, section 4.2.2). data: 2 psi elements a step for ZeRO stages 0 to 2, 3 psi for stage
    3 (Rajbhandari et al. 2020, section 7); values that are not kept are sent again for each micro-batch. replicate: an all-reduce of a
    shard's gradients, once a step, or for each micro-batch if they are not summed in fp32. context: a layer gathers keys and values,
    again if they are recomputed, and reduce-scatters their gradients. expert: the k rows of each token go to their experts and back, in
    the forward pass, again if it is recomputed, and in the backward pass.
    """
    t = layout.tensor
    m = layout.accumulation
    line = layout.tokens(model) * model.hidden * costs.element
    keys = model.kv_width * layout.tokens(model) * costs.element / t
    rows = []
    for stage in stages(model, layout):
        recomputed = layout.recompute == "full"
        collectives = stage.total(lambda layer: _collectives(model, layout, layer)) + 2 * (stage.first + stage.last)
        if costs.fp8:  # attention and MLP each gather their inputs in one byte in the forward pass
            gathers = stage.total(lambda layer: len(count.linears(model, layer)) / 2)
            collectives -= _in_fp8(stage) * gathers * (1 + recomputed) / 2
        # tensor-parallel ranks with the same whole expert read different tokens, so they sum its gradient
        of_wholes = 0 if layout.split_experts else 8 * experts(model, layout, stage)
        rows_moved = stage.total(lambda layer: expert_rows(model, layout, layer.experts) if layer.experts else 0.0)
        moved = (4 + 2 * recomputed) * rows_moved * model.hidden * costs.element
        pipeline = 0.0
        if layout.pipeline > 1:
            pipeline = line / t * m * (2 * layout.chunks - stage.first - stage.last)
            if model.tied:  # the two copies of the embedding sum their gradients
                parts = layout.sharing if costs.zero and not costs.all_reduced else 1
                pipeline += 4 * model.hidden * model.padded_vocab / t / parts * (stage.first or stage.last)
        held = [
            (layout, outside_experts(model, layout, stage)),
            (layout.of_experts, experts(model, layout, stage)),
        ]
        each_time = costs.zero >= 2 and not costs.deferred
        per_gradient = 2 * costs.reduced * (m if each_time and costs.reduced < 4 else 1)
        rows.append(
            Volume(
                (t - 1) / t * (collectives * line * m + of_wholes),
                len(stage.blocks) * (2 + (layout.recompute != "none")) * (layout.context - 1) * keys * m,
                (layout.expert - 1) / layout.expert * moved * m,
                pipeline,
                sum(_with_replicas(model, layout, costs, stage)),
                sum(per_gradient * size / seen.sharing * (seen.copies - 1) / seen.copies for seen, size in held),
            )
        )
    return rows


def busiest(every: list[Volume]) -> Volume:
    """The largest volume of any stage, for each axis."""
    return Volume(*(max(getattr(volume, axis.name) for volume in every) for axis in fields(Volume)))


def _collectives(model: ModelConfig, layout: Layout, layer: Layer) -> float:
    """Gathers and scatters of a block's activations between tensor-parallel ranks, in one micro-batch."""
    of_sublayer = 7 if layout.recompute == "full" else 5
    of_attention: float = of_sublayer
    latent = layer.mixer.latent
    if latent.kv_rank:  # gathers narrow vectors: in the forward pass, and in the backward pass them and their gradients
        narrow = ((latent.q_rank or model.hidden) + latent.kv_rank + latent.rope_dim) / model.hidden
        of_attention -= (of_sublayer + 1) / 2 * (1 - narrow)
    if layer.experts is None:
        return of_attention + of_sublayer
    of_mlp = of_sublayer - 1 if layout.split_experts else 0
    if layer.experts.shared_ffn:
        of_mlp += of_sublayer
    return of_attention + of_mlp


def _with_replicas(model: ModelConfig, layout: Layout, costs: EngineCosts, stage: Stage) -> tuple[float, float]:
    """Bytes of gradients and weights that a GPU of a stage exchanges with its replicas: for all but experts, and for experts."""
    m = layout.accumulation
    each_time = costs.zero >= 2 and not costs.deferred
    of_experts = experts(model, layout, stage)
    blocks = stage.total(lambda layer: block(model, layout, layer)) if costs.gathers else 0

    def sent(size: float, of_blocks: float, sharing: int) -> float:
        gradients = size * costs.reduced * (m if each_time else 1)
        if costs.zero == 0:
            return (sharing - 1) / sharing * 2 * gradients
        weights = (m if costs.gathers else 1) * costs.sent * (size + (costs.gathers - 1) * of_blocks)
        return (sharing - 1) / sharing * (gradients * (1 + costs.all_reduced) + weights)

    rest = outside_experts(model, layout, stage), blocks - of_experts if costs.gathers else 0
    gathered = of_experts if costs.gathers else 0
    return sent(*rest, layout.sharing), sent(of_experts, gathered, layout.of_experts.sharing)


def step(
    model: ModelConfig,
    layout: Layout,
    costs: EngineCosts,
    kind: Kind,
    efficiency: float | None = None,
    kernel: float = 1.0,
) -> Step:
    """Seconds of one optimizer step. To model other training codes, ``efficiency`` replaces the constant of the GPU's generation, and
    ``kernel`` is the speed of attention relative to FlashAttention-2."""
    efficiency = efficiency or EFFICIENCY.get(kind.family, UNMEASURED)
    attention = ATTENTION.get(kind.family, UNMEASURED / 2) * kernel
    m = layout.accumulation
    p = layout.pipeline
    t = layout.tensor
    every = stages(model, layout)
    work = [_work(model, layout, costs, stage) for stage in every]
    computing = [
        (products / efficiency + core / attention) / kind.peak + moved / kind.bandwidth
        for products, core, moved in work
    ]
    sent = volumes(model, layout, costs)
    between = [volume.context / m / _rate(layout, kind, layout.context, t) for volume in sent]
    going = [volume.expert / m / _all_to_all_rate(layout, kind) for volume in sent]
    passes = (1 + (layout.recompute == "full")) * (layout.expert > 1)
    waiting = [stage.with_experts * passes * WAIT for stage in every]
    shared = [volume.tensor / m / _rate(layout, kind, t, 1) for volume in sent]
    talking = [sum(of_stage) for of_stage in zip(shared, between, going, waiting, strict=True)]
    slowest = max(range(p), key=lambda i: computing[i] + talking[i])
    last = computing[slowest] * 2 / 3  # the backward pass of the last micro-batch
    hidden = {3: m * computing[slowest], 2: m * last}.get(costs.zero, last) * costs.overlap
    largest = busiest(sent)
    of_experts = layout.of_experts.sharing
    rates = _rate(layout, kind, layout.sharing, t), _rate(layout, kind, of_experts, t * layout.expert)
    with_replicas = [_with_replicas(model, layout, costs, stage) for stage in every]
    data = max(sum(size / rate for size, rate in zip(sizes, rates, strict=True)) for sizes in with_replicas)
    replicate = largest.replicate / _rate(layout, kind, layout.copies, t * layout.sharing)
    sharing, experts_sharing = (layout.sharing, of_experts) if costs.zero else (1, 1)
    updated = [
        outside_experts(model, layout, stage) / sharing + experts(model, layout, stage) / experts_sharing
        for stage in every
    ]
    updating = UPDATE_TRAFFIC if costs.optim.ema is None else 2 * UPDATE_TRAFFIC
    matrices = [exchange(model, layout, costs.optim, costs.zero, stage) for stage in every]
    rate = _rate(layout, kind, t * layout.ranks, 1)
    whole = max(of_stage.flops / efficiency / kind.peak + of_stage.sent / rate for of_stage in matrices)
    return Step(
        compute=m * computing[slowest],
        tensor=m * shared[slowest],
        context=m * between[slowest],
        expert=m * going[slowest],
        waits=m * waiting[slowest],
        bubble=(sum(computing) + sum(talking)) / p * idle(layout),
        pipeline=largest.pipeline / _rate(layout, kind, p, t * layout.ranks),
        data=_exposed(data, hidden),
        replicate=_exposed(replicate, last * costs.overlap),
        optimizer=max(updated) * updating / kind.bandwidth + whole,
    )


def _exposed(seconds: float, hidden: float) -> float:
    """Seconds that communication adds while ``hidden`` seconds of computation run beside it."""
    return max(0.0, seconds - hidden) + EXPOSED * min(seconds, hidden)


def _rate(layout: Layout, kind: Kind, size: int, stride: int) -> float:
    """Bytes/s of each member of a group of ``size`` ranks, ``stride`` apart. Members in one node share its network adapters."""
    if size * stride <= layout.node:
        return kind.link * ACHIEVED
    within = max(1, min(size, layout.node // stride))
    return min(kind.link, kind.network * within) * ACHIEVED


def _all_to_all_rate(layout: Layout, kind: Kind) -> float:
    """Bytes/s that a GPU sends to the ranks with the other experts, limited by its link or its share of the network."""
    peers = layout.expert - 1
    if not peers:
        return kind.link
    within = min(layout.expert, max(1, layout.node // layout.tensor))
    inside = (within - 1) / kind.link
    outside = (layout.expert - within) / kind.network
    return ACHIEVED * peers / max(inside, outside)


def _work(model: ModelConfig, layout: Layout, costs: EngineCosts, stage: Stage) -> tuple[float, float, float]:
    """Forward and backward pass of one micro-batch through a stage: FLOPs of products and of attention's core, and bytes of memory
    traffic. The backward pass does each product twice.

    A block's products cost 2 FLOPs per weight and token (Kaplan et al. 2020), counting only the k experts that a token goes to.
    Attention's core costs 4 T C per token, of which the mask leaves half.
    """
    tokens = layout.tokens(model)
    t = layout.tensor
    passes = 4 if layout.recompute == "full" else 3
    cores = len(stage.blocks) * (3 if layout.recompute == "none" else 4)
    products = (
        stage.total(lambda layer: passes * 2 * tokens * count.active_block(model, layer) / t)
        + stage.last * 6 * tokens * model.hidden * model.padded_vocab / t
    )
    core = cores * 4 * tokens * count.attended(model) * model.core_width / t
    moved = stage.total(lambda layer: passes * TRAFFIC * block_activations(model, layout, costs, layer))
    moved += stage.last * 2 * tokens * model.padded_vocab / t * costs.logit
    if costs.fp8:
        saved, quantized = _of_fp8(model, layout, stage, passes - 1)
        products -= saved
        moved += quantized
    return products, core, moved + WEIGHT_TRAFFIC * parameters(model, layout, stage)


def _of_fp8(model: ModelConfig, layout: Layout, stage: Stage, passes: int) -> tuple[float, float]:
    """FLOPs that FP8 saves in one micro-batch, because a product takes half as long; and memory traffic for quantizing operands.
    ``passes``: number of passes that multiply in FP8, all except the pass for weight gradients."""
    tokens = layout.tokens(model)
    t = layout.tensor
    part = passes * _in_fp8(stage)
    pairs = {layer: count.linears(model, layer) for layer in stage.kinds}
    weights = stage.total(lambda layer: sum(a * b for a, b in pairs[layer])) / t
    activations = stage.total(lambda layer: sum(a + b for a, b in pairs[layer])) * tokens / t / 2
    return part * tokens * weights, part * QUANTIZING * (weights + activations)


def _in_fp8(stage: Stage) -> float:
    """Fraction of a stage's blocks that engine.fp8 applies to."""
    return max(0, len(stage.blocks) - stage.first - stage.last) / len(stage.blocks)
