"""Memory of one GPU by part, in bytes.

n = tokens of a micro-batch, C hidden width, F the MLP's inner width, D a head's width, H heads, G key/value heads,
t tensor-parallel ranks.
"""

from dataclasses import dataclass, fields
from math import ceil

from hpclm.config import ModelConfig
from hpclm.model import count
from hpclm.planning.code import Code
from hpclm.planning.layout import Layout, Stage, micro_batches_held, parameters, stages


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Casts and gathered weights, the loss's copies of the token table, the process and its allocator."""
    logits: float

    @property
    def total(self) -> float:
        """All parts."""
        return sum(getattr(self, part.name) for part in fields(self))


def each(model: ModelConfig, layout: Layout, code: Code) -> list[Memory]:
    """Memory of a GPU of each pipeline stage."""
    return [of(model, layout, code, stage) for stage in stages(model, layout)]


def of(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> Memory:
    """Memory of a GPU of one stage, as if its parts were all at their largest at the same time."""
    own, table = parameters(model, layout, stage), model.padded_vocab * model.hidden / layout.tensor
    tokens = layout.micro_size * model.context
    weights, gradients, optimizer = (
        kept.on(layout.data) * own for kept in (code.weights, code.gradients, code.optimizer)
    )
    held = activations(model, layout, code, stage)
    rows = min(code.rows or tokens, tokens)
    logits = stage.last * rows * model.padded_vocab / layout.tensor * code.logit
    copies = code.gathered.whole * own + code.gathered.shared * two_blocks(model, layout, stage)
    copies += casts(model, layout, code, stage) + stage.last * code.table * table
    tensors = weights + gradients + optimizer + held + logits + copies
    return Memory(weights, gradients, optimizer, held, copies + code.fixed + code.slack * tensors, logits)


def two_blocks(model: ModelConfig, layout: Layout, stage: Stage) -> float:
    """Parameters that are gathered at a time when each block is: the one in use and the next, or the token table."""
    table = model.padded_vocab * model.hidden * (stage.first or stage.last)
    return max(2 * count.block(model), table) / layout.tensor


def activations(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> float:
    """What the backward pass will need of all micro-batches that a stage holds at once.

    Korthikanti et al. (2022), table 2: s b h (34 + 5 a s / h) a layer without recomputation, its input 2 s b h with it, and
    then one block (or one group of blocks) more, which is being recomputed.
    """
    between = layout.tensor if code.sequence else 1
    tokens = layout.micro_size * model.context
    line = tokens * model.hidden * code.element / between  # one activation between layers
    whole = block(model, layout, code)
    if layout.recompute == "full":
        groups = ceil(stage.blocks / layout.recompute_every)
        kept, extra = groups * line, min(stage.blocks, layout.recompute_every) * whole
    else:
        kept, extra = stage.blocks * whole, 0.0
        if layout.recompute == "selective" and not code.flash:
            core = scores(model, layout, code)
            kept, extra = kept - stage.blocks * core, core
    dropped = tokens * model.hidden * code.mask * bool(model.dropout) / between
    if code.flash and model.positions == "alibi":  # distances of all pairs, made for each micro-batch
        kept += model.heads * model.context**2 * code.element / layout.tensor
    first = dropped + line * model.embed_norm + tokens * 8  # ids, of 8 bytes
    ends = stage.first * first + stage.last * (2 * line + tokens * 8)  # the last norm's input, the loss's gradient
    leaving = code.outputs and not stage.last
    return micro_batches_held(layout, stage) * (kept + ends + leaving * line) + extra


def block(model: ModelConfig, layout: Layout, code: Code) -> float:
    """What one block keeps of one micro-batch, tensor by tensor: Korthikanti et al. (2022), section 4.1, for any shape.

    Between layers: inputs and outputs of two norms, two dropout masks. Shared by tensor ranks: the fused projection 3 C
    (C + 2 G D with grouped queries), the core's output, the MLP's inside; queries and keys once more where they are
    normalised or rotated, queries where they are cut out of groups; the logarithm of flash attention's sums.
    """
    c, keys, inner = model.hidden, model.groups * model.head_width, model.ffn_width
    changed = model.positions == "rope" or model.qk_norm
    again = c + keys if changed else c * (model.groups < model.heads)
    inside = (c + 2 * keys) + again + c + (4 if model.gated else 2) * inner
    between = 4 * c * code.element + 2 * c * code.mask * bool(model.dropout)
    width = between / (layout.tensor if code.sequence else 1) + inside * code.element / layout.tensor
    if code.flash:
        width += 4 * model.heads / layout.tensor
    return layout.micro_size * model.context * width + (0.0 if code.flash else scores(model, layout, code))


def scores(model: ModelConfig, layout: Layout, code: Code) -> float:
    """Attention's probabilities of one block, and with dropout its mask and what it leaves: 5 a s^2 b in 16 bits."""
    dropped = (code.mask + code.element) * bool(model.attention_dropout)
    return layout.micro_size * model.heads * model.context**2 * (code.element + dropped) / layout.tensor


def casts(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> float:
    """Block weights in the compute type, which autograd keeps from a forward pass until its backward pass."""
    once = code.casts * count.block(model) / layout.tensor
    if layout.recompute == "full":
        return once * min(stage.blocks, layout.recompute_every)
    return once * stage.blocks * micro_batches_held(layout, stage)
