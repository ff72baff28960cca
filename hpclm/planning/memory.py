"""Memory of one GPU by part, in bytes.

n = tokens of a micro-batch on this rank, C hidden width, F the MLP's inner width, D a head's width, H heads, G key/value heads,
t tensor-parallel ranks.
"""

from dataclasses import dataclass, fields
from math import ceil

from hpclm.config import ModelConfig
from hpclm.model import count
from hpclm.planning.engines import EngineCosts
from hpclm.planning.layout import Layout, Stage, micro_batches_held, parameters, stages
from hpclm.planning.matrices import exchange

PROCESS = 3 * 2**30
"""Bytes of a process other than tensors: CUDA context, NCCL buffers, cuBLAS workspaces, libraries."""
SLACK = 0.13
"""Overhead of the allocator, as a fraction of the tensors."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Cast and gathered weights, the loss's copies of the embedding."""
    logits: float

    @property
    def tensors(self) -> float:
        """All parts."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def overhead(self) -> float:
        """The process and its allocator."""
        return PROCESS + SLACK * self.tensors

    @property
    def total(self) -> float:
        """Tensors and overhead."""
        return self.tensors + self.overhead


def of_stages(model: ModelConfig, layout: Layout, costs: EngineCosts) -> list[Memory]:
    """Memory of a GPU of each pipeline stage."""
    return [of_stage(model, layout, costs, stage) for stage in stages(model, layout)]


def of_stage(model: ModelConfig, layout: Layout, costs: EngineCosts, stage: Stage) -> Memory:
    """Memory of one GPU of a stage at the fullest moment of a step: while the loss has its logits, while the last block is in its
    backward pass (and recomputed, if it is), or while the optimizer works on whole matrices."""
    weight_count = parameters(model, layout, stage)
    weights, gradients, optimizer = (
        part.on(layout.sharing) * weight_count for part in (costs.weights, costs.gradients, costs.optimizer)
    )
    of_others = weight_count - stage.blocks * count.block(model) / layout.tensor
    optimizer += costs.outside * of_others / (layout.sharing if costs.zero else 1)
    if costs.deferred and layout.accumulation > 1:
        gradients = costs.reduced * weight_count  # whole until the last backward pass
    held = activations(model, layout, costs, stage)
    tokens, table = layout.tokens(model), model.padded_vocab * model.hidden / layout.tensor
    rows = min(costs.loss_chunk or count.loss_chunk(tokens, model.padded_vocab // layout.tensor, costs.memory), tokens)
    several, block = rows < tokens, count.block(model) / layout.tensor
    # the loss has its inputs, which tensor-parallel ranks gather, and their gradient; of several chunks it sums gradients
    of_loss = stage.last * tokens * model.hidden * costs.element * (2 + (layout.tensor > 1) / layout.tensor)
    entries = stage.last * rows * model.padded_vocab / layout.tensor
    logits = entries * (costs.logit + costs.element * several)
    if not several:  # the table's gradient is made from that of the logits
        logits = max(logits, 2 * costs.element * entries + costs.table_at_once * stage.last * table)
    copied = copies(model, layout, costs, stage)
    in_backward = held + working(model, layout, costs)
    # gradients of the block before are still being reduced, when its activations are free
    freed = 0.0 if layout.recompute == "full" else block_activations(model, layout, costs)
    prefetched = costs.gathered.sharded * block
    prefetched += stage.last * table * costs.table / 2 * (model.tied or costs.working > 0)
    matrices = exchange(model, layout, costs.optim, costs.zero, stage)
    optimizer += matrices.state
    updating = costs.gathered.replicated * weight_count + costs.buckets + matrices.memory
    held, copied, scored = max(
        (held + of_loss, copied + stage.last * table * costs.table * several, logits),
        (in_backward, copied + prefetched, 0.0),
        (in_backward - freed, copied + prefetched + costs.working * block, 0.0),
        (0.0, updating, 0.0),
        key=sum,
    )
    return Memory(weights, gradients, optimizer, held, copied, scored)


def copies(model: ModelConfig, layout: Layout, costs: EngineCosts, stage: Stage) -> float:
    """Weights that were cast or gathered, while one block computes, and buckets."""
    weight_count, block = parameters(model, layout, stage), count.block(model) / layout.tensor
    at_once = max(weight_count - (stage.blocks - 1) * block, min(weight_count, costs.kept))
    gathered = costs.gathered.replicated * weight_count + costs.gathered.sharded * at_once
    return gathered + casts(model, layout, costs, stage) + costs.buckets


def working(model: ModelConfig, layout: Layout, costs: EngineCosts) -> float:
    """Activations of the block that is in its backward pass: gradients in the MLP, and what is recomputed."""
    tokens = layout.tokens(model)
    size = tokens * (model.hidden + model.ffn_width) * costs.element / layout.tensor
    if layout.recompute == "full":
        size += block_activations(model, layout, costs) * min(layout.recompute_every, model.layers)
    return size


def activations(model: ModelConfig, layout: Layout, costs: EngineCosts, stage: Stage) -> float:
    """Activations saved for the backward pass, of all micro-batches that are in flight in a stage.

    Korthikanti et al. (2022), table 2, without the scores that flash attention does not store: 34 s b h a layer without
    recomputation, its input 2 s b h with it.
    """
    tokens = layout.tokens(model)
    line = tokens * model.hidden * costs.element / layout.tensor  # one activation between layers
    if layout.recompute == "full":
        kept = ceil(stage.blocks / layout.recompute_every) * line
    else:
        kept = stage.blocks * block_activations(model, layout, costs)
    if model.positions == "alibi" and layout.context == 1:  # distances of all pairs, made for each micro-batch
        kept += model.heads * model.context**2 * costs.element / layout.tensor
    first = tokens * model.hidden * bool(model.dropout) / layout.tensor + line * model.embed_norm
    # ids of 8 bytes; the last norm's input, labels
    kept += stage.first * (first + tokens * 8) + stage.last * (line + tokens * 8)
    kept += costs.staged * (not stage.last) * line
    received = costs.staged * layout.accumulation * ((not stage.first) + (not stage.last)) * line
    return micro_batches_held(layout, stage) * kept + received


def block_activations(model: ModelConfig, layout: Layout, costs: EngineCosts) -> float:
    """Activations that one block saves of one micro-batch, tensor by tensor: Korthikanti et al. (2022), section 4.1.

    Split over tensor-parallel ranks, as all between layers: inputs and outputs of two norms, two dropout masks; the fused
    projection 3 C (C + 2 G D with grouped queries), the attention output, the MLP's inner activations; queries and keys again if
    they are normalised or rotated, queries if they are cut out of groups; flash attention's log-sum-exp.
    """
    c, queries, keys = model.hidden, model.attention_width, model.groups * model.head_width
    changed = model.positions == "rope" or model.qk_norm
    again = queries + keys if changed else queries * (model.groups < model.heads)
    norms = 6 if model.norm_order == "sandwich" else 4  # with their outputs
    # compiled blocks keep what attention and MLP gather, and gather nothing again
    norms += 2 * (layout.tensor - 1) * costs.compiled
    # what the activation function reads and makes, and with gates both their factors, of which compiled blocks compute one again;
    # ReLU's output tells its gradient
    saved = 4 - costs.compiled if model.gated else 1 if model.activation == "relu" else 2
    elements = norms * c + (queries + 2 * keys) + again + queries + saved * model.ffn_width
    width = elements * costs.element + 2 * c * bool(model.dropout) + 4 * model.heads
    whole = 2 * keys * layout.tokens(model) * layout.context * costs.element * (layout.context > 1)  # keys and values
    return (layout.tokens(model) * width + whole) / layout.tensor


def casts(model: ModelConfig, layout: Layout, costs: EngineCosts, stage: Stage) -> float:
    """Block weights in the compute type, which autograd saves from the forward pass until the backward pass."""
    once = costs.casts * count.block(model) / layout.tensor
    if layout.recompute == "full":
        return once * min(stage.blocks, layout.recompute_every)
    return once * stage.blocks * micro_batches_held(layout, stage)
