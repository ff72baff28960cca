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
    """Cast and gathered weights, the loss's copies of the embedding, the process and its allocator."""
    logits: float

    @property
    def total(self) -> float:
        """All parts."""
        return sum(getattr(self, part.name) for part in fields(self))


def each(model: ModelConfig, layout: Layout, code: Code) -> list[Memory]:
    """Memory of a GPU of each pipeline stage."""
    return [of(model, layout, code, stage) for stage in stages(model, layout)]


def of(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> Memory:
    """Memory of one GPU of a stage at the fullest moment of a step: while the loss has its logits, or while the last block is
    in its backward pass (and recomputed, if it is)."""
    own = parameters(model, layout, stage)
    state = [part.on(layout.sharing) * own for part in (code.weights, code.gradients, code.optimizer)]
    if code.deferred and layout.accumulation > 1:
        state[1] = code.reduced * own  # whole until the last backward pass
    held = activations(model, layout, code, stage)
    during_loss = held + ends_of_loss(model, layout, code, stage)
    copied = copies(model, layout, code, stage, False)
    several, scored = logits(model, layout, code, stage)
    each = code.table if several or code.table_at_once is None else code.table_at_once
    table = stage.last * each * model.padded_vocab * model.hidden / layout.tensor
    moments = [(during_loss, copied + table * several, scored)]
    if not several:  # the gradient of the embedding comes when the log-probabilities have gone
        moments.append((during_loss, copied + table, scored * min(1, 2 * code.element / code.logit)))
    moments.append((held + working(model, layout, code), copies(model, layout, code, stage, True), 0.0))
    moments.append((0.0, (code.gathered.replicated + code.flattened) * own, 0.0))
    kept, copied, scored = max(moments, key=sum)
    if scored and code.fresh_tables and layout.data == layout.accumulation == 1:
        state[1] -= own_tables(model, layout, stage) * code.gradients.replicated
    tensors = sum(state) + kept + scored + copied
    weights, gradients, optimizer = state
    return Memory(weights, gradients, optimizer, kept, copied + code.fixed + code.slack * tensors, scored)


def own_tables(model: ModelConfig, layout: Layout, stage: Stage) -> float:
    """Parameters of the embeddings of a stage."""
    table = model.padded_vocab * model.hidden / layout.tensor
    return table * (stage.first + (stage.last and not (model.tied and stage.first)))


def logits(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> tuple[bool, float]:
    """Whether the loss has several chunks of tokens, and what it computes of one, with what is left of the one before."""
    tokens = layout.micro_size * model.context
    rows = min(code.rows or tokens, tokens)
    if code.memory:
        rows = count.loss_chunk(tokens, model.padded_vocab // layout.tensor, code.memory)
    split = layout.tensor > 1 and code.split_logit is not None
    each = (code.split_logit if split else code.logit) + code.element * (rows < tokens)  # type: ignore[operator]
    return rows < tokens, stage.last * rows * model.padded_vocab / layout.tensor * each


def ends_of_loss(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> float:
    """Inputs of the loss and their gradient, whole; tensor-parallel ranks gather the inputs."""
    line = layout.micro_size * model.context * model.hidden * code.element
    if not code.sequence or layout.tensor == 1:
        return stage.last * line * 2
    return stage.last * line * (2 + 1 / layout.tensor)


def copies(model: ModelConfig, layout: Layout, code: Code, stage: Stage, backward: bool) -> float:
    """Weights that were cast or gathered, and gradients that are not reduced yet."""
    own, table = parameters(model, layout, stage), model.padded_vocab * model.hidden / layout.tensor
    each, several = count.block(model) / layout.tensor, 1 + backward
    found = code.gathered.replicated * own + casts(model, layout, code, stage)
    found += code.gathered.sharded * (own - stage.blocks * each + several * each)
    if backward:
        kept = code.table_kept if model.tied or code.working else 0
        return found + code.working * each + code.buckets + stage.last * kept * table
    return found + code.buckets * code.buckets_kept


def working(model: ModelConfig, layout: Layout, code: Code) -> float:
    """Activations of the block that is in its backward pass: gradients in the MLP, and what is recomputed."""
    tokens = layout.micro_size * model.context
    c, inner = model.hidden, model.ffn_width
    found = tokens * (c + inner) * code.element / layout.tensor
    if layout.recompute == "full":
        found += block(model, layout, code) * min(layout.recompute_every, model.layers)
    elif layout.recompute == "selective" and not code.flash:
        found += scores(model, layout, code)
    return found


def activations(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> float:
    """Activations saved for the backward pass, of all micro-batches that are in flight in a stage.

    Korthikanti et al. (2022), table 2: s b h (34 + 5 a s / h) a layer without recomputation, its input 2 s b h with it.
    """
    between = layout.tensor if code.sequence else 1
    tokens = layout.micro_size * model.context
    line = tokens * model.hidden * code.element / between  # one activation between layers
    whole = block(model, layout, code)
    if layout.recompute == "full":
        groups = ceil(stage.blocks / layout.recompute_every)
        kept = groups * line
    else:
        kept = stage.blocks * whole
        if layout.recompute == "selective" and not code.flash:
            kept -= stage.blocks * scores(model, layout, code)
    dropped = tokens * model.hidden * code.mask * bool(model.dropout) / between
    if code.flash and model.positions == "alibi":  # distances of all pairs, made for each micro-batch
        kept += model.heads * model.context**2 * code.element / layout.tensor
    first = dropped + line * model.embed_norm + tokens * 8  # ids, of 8 bytes
    ends = stage.first * first + stage.last * (line + tokens * 8)  # the last norm's input, labels
    leaving = code.outputs and not stage.last
    neighbours = (not stage.first) + (not stage.last)
    received = code.received * layout.accumulation * neighbours * line
    return micro_batches_held(layout, stage) * (kept + ends + leaving * line) + received


def block(model: ModelConfig, layout: Layout, code: Code) -> float:
    """Activations that one block saves of one micro-batch, tensor by tensor: Korthikanti et al. (2022), section 4.1.

    Between layers: inputs and outputs of two norms, two dropout masks. Split over tensor-parallel ranks: the fused projection 3 C
    (C + 2 G D with grouped queries), the attention output, the MLP's inner activations; queries and keys again if they are
    normalised or rotated, queries if they are cut out of groups; flash attention's log-sum-exp.
    """
    c, keys, inner = model.hidden, model.groups * model.head_width, model.ffn_width
    changed = model.positions == "rope" or model.qk_norm
    again = c + keys if changed else c * (model.groups < model.heads)
    # what the activation function reads and makes, and with gates both their factors; ReLU's output tells its gradient
    saved = 4 if model.gated else 1 if model.activation == "relu" else 2
    inside = (c + 2 * keys) + again + c + saved * inner
    between = 4 * c * code.element + 2 * c * code.mask * bool(model.dropout)
    width = between / (layout.tensor if code.sequence else 1) + inside * code.element / layout.tensor
    if code.flash:
        width += 4 * model.heads / layout.tensor
    return layout.micro_size * model.context * width + (0.0 if code.flash else scores(model, layout, code))


def scores(model: ModelConfig, layout: Layout, code: Code) -> float:
    """Attention probabilities of one block, and with dropout its mask and its output: 5 a s^2 b in 16 bits."""
    dropped = (code.mask + code.element) * bool(model.attention_dropout)
    return layout.micro_size * model.heads * model.context**2 * (code.element + dropped) / layout.tensor


def casts(model: ModelConfig, layout: Layout, code: Code, stage: Stage) -> float:
    """Block weights in the compute type, which autograd saves from the forward pass until the backward pass."""
    once = code.casts * count.block(model) / layout.tensor
    if layout.recompute == "full":
        return once * min(stage.blocks, layout.recompute_every)
    return once * stage.blocks * micro_batches_held(layout, stage)
