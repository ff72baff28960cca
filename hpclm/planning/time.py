"""Time of an optimizer step, in seconds: products, memory traffic and communication, one after another where nothing
overlaps them.

n = tokens of a micro-batch, T tokens of a sample, C hidden width, F the MLP's inner width, V padded vocabulary,
t tensor-parallel ranks.
"""

from dataclasses import dataclass

from hpclm.cluster.kinds import Kind
from hpclm.config import ModelConfig
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


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step, by what they are spent on; they add up."""

    compute: float
    """Products and memory traffic of the stage that takes longest."""
    tensor: float
    """Gathers and scatters among tensor-parallel ranks."""
    bubble: float
    """Waiting for other pipeline stages to fill and to drain."""
    pipeline: float
    """Activations and their gradients on their way between stages."""
    data: float
    """Gradients and weights among replicas, as far as nothing hides it."""
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds."""
        return self.compute + self.tensor + self.bubble + self.pipeline + self.data + self.optimizer


@dataclass(frozen=True)
class Volume:
    """Bytes that one GPU sends in a step along each axis."""

    tensor: float
    pipeline: float
    data: float


@dataclass(frozen=True)
class Work:
    """What a GPU does for one micro-batch."""

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
    """Part of a step that a pipeline of equal stages waits: (p - 1) / (v m + p - 1) (Narayanan et al. 2021, section 2.2).

    A zero-bubble schedule (ZB-H1 of Qi et al. 2023) fills two thirds of it with gradients of weights.
    """
    waits = (layout.pipeline - 1) * (1 / 3 if layout.schedule == "zero_bubble" else 1.0)
    return waits / (layout.chunks * layout.accumulation + waits)


def volume(model: ModelConfig, layout: Layout, code: Code) -> Volume:
    """Bytes that one GPU of the busiest stage sends in a step.

    tensor: a layer's forward pass makes 4 gathers and scatters of its activations, its backward pass 4 (Korthikanti et al.
    2022, section 4.2.2). data: 2 psi elements a step for ZeRO stages 0 to 2, 3 psi for stage 3 (Rajbhandari et al. 2020,
    section 7), of which each further micro-batch repeats what is not kept.
    """
    every = stages(model, layout)
    tensor = max(_passes(model, layout, code, stage).sent for stage in every) * layout.accumulation
    line = layout.micro_size * model.context * model.hidden * code.element / (layout.tensor if code.sequence else 1)
    pipeline = 2 * line * layout.chunks * layout.accumulation * (layout.pipeline > 1)
    psi = max(parameters(model, layout, stage) for stage in every) * (layout.data - 1) / layout.data
    gradients = psi * code.reduced * (layout.accumulation if code.zero >= 2 else 1)
    again = (
        psi * code.reduced if code.zero == 0 else psi * code.sent
    )  # the second half of an all-reduce, or the new weights
    if code.zero == 3:
        again = 2 * psi * code.sent * layout.accumulation
    return Volume(tensor, pipeline, gradients + again)


def step(model: ModelConfig, layout: Layout, code: Code, kind: Kind, efficiency: float | None = None) -> Step:
    """One optimizer step; ``efficiency`` instead of the constant of the GPU's generation."""
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
    between = bytes_.pipeline / _rate(layout, kind, layout.pipeline, layout.tensor * layout.data)
    reducing = bytes_.data / _rate(layout, kind, layout.data, layout.tensor)
    hidden = 0.0
    if code.overlap:
        hidden = compute if code.zero == 3 else computing[slowest] * 2 / 3 * (m if code.zero == 2 else 1)
    own = max(parameters(model, layout, stage) for stage in stages(model, layout))
    update = (
        own * 28 / (layout.data if code.zero else 1) / kind.bandwidth
    )  # fp32: reads w, g, m and v, writes w, m and v
    return Step(compute, m * talking[slowest], waiting, between, max(0.0, reducing - hidden), update)


def _rate(layout: Layout, kind: Kind, size: int, stride: int) -> float:
    """Bytes/s of each member of a group of ``size`` ranks, ``stride`` apart; members in one node use their adapters together."""
    if size * stride <= layout.node:
        return kind.link * ACHIEVED
    return min(kind.link, kind.network * layout.within(size, stride)) * ACHIEVED


def _seconds(work: Work, code: Code, kind: Kind, efficiency: float) -> float:
    core = ATTENTION.get(kind.family, UNMEASURED / 2) * code.kernel if code.flash else efficiency
    return (
        work.products / (kind.peak * efficiency) + work.attention / (kind.peak * core) + work.traffic / kind.bandwidth
    )


def _passes(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> Work:
    """Forward and backward pass of one micro-batch through a stage, and what is computed again."""
    tokens, c = layout.micro_size * model.context, model.hidden
    layer, core = _layer(model, layout, code), _core(model, layout, code)
    again = Work()
    if layout.recompute == "full":
        again = layer + core
    elif layout.recompute == "selective":
        again = core
    # the backward pass does each product twice, for the inputs' gradient and for the weights', but communicates once
    there_and_back = (layer + core) * 3 + Work(sent=-layer.sent)
    table = c * model.padded_vocab / layout.tensor
    head = Work(6 * tokens * table, 0, tokens * model.padded_vocab / layout.tensor * 2 * code.logit)
    weights = Work(traffic=parameters(model, layout, stage) * code.touched)
    return (there_and_back + again) * stage.blocks + head * stage.last + weights


def _layer(model: ModelConfig, layout: Layout, code: Code) -> Work:
    """A block's forward pass without attention's core: 2 FLOPs a weight and token (Kaplan et al. 2020).

    Every operand of a product and of what stands between products is read or written once.
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
    """Scores, softmax and mean of the values, forward: 4 T C FLOPs a token, half of them with a kernel that skips the mask."""
    tokens, c, t = layout.micro_size * model.context, model.hidden, layout.tensor
    flops = 4 * tokens * model.context * c / t
    if code.flash:
        moved = tokens * 4 * c * code.element / t
        return Work(0, flops / 2, moved)
    passes = 4 + 3 * bool(model.attention_dropout)  # written, read, written as probabilities, read; dropout's pass
    return Work(0, flops, tokens * model.heads * model.context * passes * code.element / t)
