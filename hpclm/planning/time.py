"""Time of an optimizer step, in seconds: matrix products, memory traffic and communication, in sequence unless they overlap.

n = tokens of a micro-batch, T tokens of a sample, C hidden width, F the MLP's inner width, V padded vocabulary,
t tensor-parallel ranks.
"""

from dataclasses import dataclass, fields

from hpclm.config import ModelConfig
from hpclm.model import count
from hpclm.node.gpus import Kind
from hpclm.planning.code import Code
from hpclm.planning.layout import Layout, Stage, parameters, stages

EFFICIENCY = {"Ampere": 0.67, "Hopper": 0.56}
"""Part of the peak that matrix products reach: one constant a generation, fitted to published runs (docs/planner.md)."""
UNMEASURED = 0.56
"""The same for generations without published runs to fit."""
ATTENTION = {"Ampere": 0.55, "Hopper": 0.33}
"""Part of the peak that FlashAttention-2 reaches, forward and backward, causal (Dao 2023, section 4.1)."""
ACHIEVED = 0.8
"""Part of a link's nominal rate that collectives reach."""

EXPOSED = 0.1
"""Part of the communication that overlaps with computation and still costs time: it slows the products down, and its first and last
messages have nothing to hide behind. Fitted to every second of the published multi-node runs (docs/planner.md)."""


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step, by cause; they add up."""

    compute: float
    """Matrix products and memory traffic of the slowest stage."""
    tensor: float
    """Gathers and scatters between tensor-parallel ranks."""
    bubble: float
    """Waiting while the pipeline fills and drains."""
    pipeline: float
    """Sending activations and their gradients between stages."""
    data: float
    """Communication of gradients and weights between replicas that computation does not hide; with hybrid sharding between those that
    share out the weights."""
    replicate: float
    """The same between replicas that hold the same shard."""
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds."""
        return self.compute + self.tensor + self.bubble + self.pipeline + self.data + self.replicate + self.optimizer


@dataclass(frozen=True)
class Volume:
    """Bytes that one GPU sends in a step along each axis."""

    tensor: float
    pipeline: float
    data: float
    """To replicas; with hybrid sharding to those that share out the weights."""
    replicate: float = 0.0
    """To replicas that hold the same shard."""


@dataclass(frozen=True)
class Work:
    """The work of one GPU for one micro-batch."""

    products: float = 0.0
    """FLOPs of matrix products."""
    attention: float = 0.0
    """FLOPs of attention's core."""
    traffic: float = 0.0
    """Bytes between memory and processors."""
    sent: float = 0.0
    """Bytes to tensor-parallel ranks."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.traffic + other.traffic,
            self.sent + other.sent,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(self.products * times, self.attention * times, self.traffic * times, self.sent * times)


def bubble(layout: Layout) -> float:
    """Fraction of a step that a pipeline of equal stages is idle: (p - 1) / (v m + p - 1) (Narayanan et al. 2021, section 2.2).

    A zero-bubble schedule (ZB-H1 of Qi et al. 2023) fills two thirds of it with gradients of weights.
    """
    waits = (layout.pipeline - 1) * (1 / 3 if layout.schedule == "zero_bubble" else 1.0)
    return waits / (layout.chunks * layout.accumulation + waits)


def volume(model: ModelConfig, layout: Layout, code: Code) -> Volume:
    """Bytes that one GPU of the busiest stage sends in a step, for each axis."""
    every = volumes(model, layout, code)
    return Volume(*(max(getattr(v, axis.name) for v in every) for axis in fields(Volume)))


def volumes(model: ModelConfig, layout: Layout, code: Code) -> list[Volume]:
    """Bytes that one GPU of each stage sends in a step.

    tensor: a layer's forward pass makes 4 gathers and scatters of its activations, its backward pass 4 and with sequence
    parallelism 2 more (Korthikanti et al. 2022, section 4.2.2). data: 2 psi elements a step for ZeRO stages 0 to 2, 3 psi for
    stage 3 (Rajbhandari et al. 2020, section 7); what is not kept is sent again for each micro-batch. replicate: an all-reduce of
    the gradients of a shard.
    """
    found = []
    for stage in stages(model, layout):
        tensor = _passes(model, layout, code, stage).sent * layout.accumulation
        boundaries = (2 * layout.chunks - stage.first - stage.last) * (layout.pipeline > 1)
        pipeline = between_stages(model, layout, code) * layout.accumulation * boundaries
        if model.tied and layout.pipeline > 1:  # the two copies of the embedding sum their gradients
            pipeline += 4 * model.hidden * model.padded_vocab / layout.tensor * (stage.first or stage.last)
        data, between = _replicas(model, layout, code, stage), _between_copies(model, layout, code, stage)
        found.append(Volume(tensor, pipeline, data, between))
    return found


def between_stages(model: ModelConfig, layout: Layout, code: Code) -> float:
    """Bytes of the activations of a micro-batch between two stages."""
    between = layout.tensor if code.sequence else 1
    return layout.micro_size * model.context * model.hidden * code.element / between


def _replicas(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> float:
    """Bytes that one GPU of a stage sends in a step to the replicas that it shares weights or optimizer state with, or to all."""
    others = (layout.sharing - 1) / layout.sharing
    psi, m = parameters(model, layout, stage) * others, layout.accumulation
    gradients = psi * code.reduced * (m if code.zero >= 2 and not code.deferred else 1)
    if code.zero == 0:
        return 2 * gradients
    if code.all_reduced:
        gradients *= 2
    gathers = {3: 2}.get(code.zero, 0) if code.gathers is None else code.gathers
    table = model.hidden * model.padded_vocab / layout.tensor * others
    again = code.sent_table * table * (stage.first + (stage.last and not (model.tied and stage.first)))
    if not gathers:
        return gradients + psi * code.sent + again
    blocks = stage.blocks * count.block(model) / layout.tensor * others
    return gradients + m * code.sent * (gathers * blocks + psi - blocks)


def _between_copies(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> float:
    """Bytes that one GPU of a stage sends in a step to the replicas that hold the same shard: once, but sums of gradients that are
    not in fp32 are not kept until the last micro-batch."""
    times = layout.accumulation if code.zero >= 2 and code.reduced < 4 and not code.deferred else 1
    own = parameters(model, layout, stage) / layout.sharing
    return 2 * own * code.reduced * times * (layout.copies - 1) / layout.copies


def step(model: ModelConfig, layout: Layout, code: Code, kind: Kind, efficiency: float | None = None) -> Step:
    """One optimizer step; ``efficiency`` replaces the constant of the GPU's generation."""
    reached = efficiency or EFFICIENCY.get(kind.family, UNMEASURED)
    every = [_passes(model, layout, code, stage) for stage in stages(model, layout)]
    computing = [_seconds(work, code, kind, reached) for work in every]
    link = _rate(layout, kind, layout.tensor, 1)
    talking = [0.0 if code.overlap_tensor else work.sent / link for work in every]
    slowest = max(range(len(every)), key=lambda i: computing[i] + talking[i])
    others = sum(computing) + sum(talking) - computing[slowest] - talking[slowest]
    waiting = others / layout.chunks * (1 / 3 if layout.schedule == "zero_bubble" else 1.0)
    m, bytes_ = layout.accumulation, volume(model, layout, code)
    compute = m * computing[slowest]
    messages = 2 * layout.chunks * m * (layout.pipeline > 1)
    between = (
        messages
        * between_stages(model, layout, code)
        / _rate(layout, kind, layout.pipeline, layout.tensor * layout.data)
    )
    last = computing[slowest] * 2 / 3  # the backward pass of the last micro-batch
    hidden = compute if code.zero == 3 else last * (m if code.zero == 2 else 1)
    sharing = _exposed(bytes_.data / _rate(layout, kind, layout.sharing, layout.tensor), hidden * code.overlap)
    across = _rate(layout, kind, layout.copies, layout.tensor * layout.sharing)
    copying = _exposed(bytes_.replicate / across, last * code.overlap)
    own = max(parameters(model, layout, stage) for stage in stages(model, layout))
    update = (
        own * 28 / (layout.sharing if code.zero else 1) / kind.bandwidth
    )  # fp32: reads w, g, m and v, writes w, m and v
    return Step(compute, m * talking[slowest], waiting, between, sharing, copying, update)


def _exposed(seconds: float, hidden: float) -> float:
    """Seconds that communication costs if computation of ``hidden`` seconds runs beside it."""
    return max(0.0, seconds - hidden) + EXPOSED * min(seconds, hidden)


def _rate(layout: Layout, kind: Kind, size: int, stride: int) -> float:
    """Bytes/s of each member of a group of ``size`` ranks, ``stride`` apart; members in one node share their adapters."""
    if size * stride <= layout.node:
        return kind.link * ACHIEVED
    return min(kind.link, kind.network * layout.within(size, stride)) * ACHIEVED


def _seconds(work: Work, code: Code, kind: Kind, efficiency: float) -> float:
    core = ATTENTION.get(kind.family, UNMEASURED / 2) * code.kernel if code.flash else efficiency
    return (
        work.products / (kind.peak * efficiency) + work.attention / (kind.peak * core) + work.traffic / kind.bandwidth
    )


def _passes(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> Work:
    """Forward and backward pass of one micro-batch through a stage, including recomputation."""
    tokens, c = layout.micro_size * model.context, model.hidden
    layer, core = _layer(model, layout, code), _core(model, layout, code)
    recomputed = Work()
    if layout.recompute == "full":
        recomputed = layer + core
    elif layout.recompute == "selective":
        recomputed = core
    # the backward pass does each product twice, for the inputs' gradient and for the weights', but communicates once
    there_and_back = (layer + core) * 3 + Work(sent=-layer.sent * (0.5 if code.sequence else 1.0))
    # the embedding's output is scattered, the head's input gathered, and their gradients the other way
    ends = Work(sent=layer.sent / 2 * (stage.first + stage.last) * code.sequence)
    table = c * model.padded_vocab / layout.tensor
    head = Work(6 * tokens * table, 0, tokens * model.padded_vocab / layout.tensor * 2 * code.logit)
    weights = Work(traffic=parameters(model, layout, stage) * code.touched)
    return (there_and_back + recomputed) * stage.blocks + head * stage.last + weights + ends


def _layer(model: ModelConfig, layout: Layout, code: Code) -> Work:
    """A block's forward pass without attention's core: 2 FLOPs a weight and token (Kaplan et al. 2020).

    Every operand of a product, and of the operations between products, is read or written once.
    """
    tokens, c, t = layout.micro_size * model.context, model.hidden, layout.tensor
    between = t if code.sequence else 1
    keys, inner = model.groups * model.head_width, model.ffn_width
    up, fused = inner * (1 + model.gated), c + 2 * keys
    weights = c * (fused + c + up + inner)
    products = 4 * c + (fused + c + up + inner) / t
    elementwise = (4 + 6) * c / between + (up + inner) / t  # two norms, two additions; the activation
    if model.positions == "rope" or model.qk_norm:
        elementwise += 2 * (c + keys) / t
    dropped = 2 * (2 * c * code.element + c * code.mask) / between * bool(model.dropout)
    sent = 4 * (t - 1) / t * tokens * c * code.element
    return Work(2 * tokens * weights / t, 0, tokens * ((products + elementwise) * code.element + dropped), sent)


def _core(model: ModelConfig, layout: Layout, code: Code) -> Work:
    """Forward pass of the attention core: 4 T C FLOPs per token, or half with a kernel that skips the causal mask."""
    tokens, c, t = layout.micro_size * model.context, model.hidden, layout.tensor
    flops = 4 * tokens * model.context * c / t
    if code.flash:
        moved = tokens * 4 * c * code.element / t
        return Work(0, flops / 2, moved)
    passes = 4 + 3 * bool(model.attention_dropout)  # written, read, written as probabilities, read; dropout's pass
    return Work(0, flops, tokens * model.heads * model.context * passes * code.element / t)
