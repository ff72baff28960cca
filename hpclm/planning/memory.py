"""Memory of one GPU by part, in bytes.

C = hidden width, D a head's width, G key/value heads, k experts per token. All experts are assumed to get the same number of tokens; a
rank with more tokens needs more memory.
"""

from dataclasses import dataclass, fields
from math import ceil

from hpclm.config import ModelConfig
from hpclm.config.attention import AttentionConfig
from hpclm.config.experts import ExpertsConfig
from hpclm.config.layer import Layer
from hpclm.model import count
from hpclm.planning.engines import EngineCosts
from hpclm.planning.layout import Layout, Stage, block, frozen, micro_batches_held, outside_experts, parameters, stages
from hpclm.planning.layout import experts as experts_of
from hpclm.planning.matrices import exchange

PROCESS = 3 * 2**30
"""Bytes of a process in addition to tensors: CUDA context, NCCL buffers, cuBLAS workspaces, libraries."""
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
        """Bytes of all tensors."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def overhead(self) -> float:
        """Bytes of the process and of its allocator's overhead."""
        return PROCESS + SLACK * self.tensors

    @property
    def total(self) -> float:
        """Bytes of tensors and overhead."""
        return self.tensors + self.overhead


def of_stages(model: ModelConfig, layout: Layout, costs: EngineCosts) -> list[Memory]:
    """Memory of a GPU of each pipeline stage."""
    return [of_stage(model, layout, costs, stage) for stage in stages(model, layout)]


def of_stage(model: ModelConfig, layout: Layout, costs: EngineCosts, stage: Stage) -> Memory:
    """Memory of one GPU of a stage at its peak in a step. The peak is at the logits of the loss, in the backward pass (and recomputation)
    of the last block, or while the optimizer works on whole matrices."""
    weight_count = parameters(model, layout, stage)
    plain = outside_experts(model, layout, stage)
    expert = experts_of(model, layout, stage)
    experts_sharing = layout.of_experts.sharing
    frozen_plain = frozen(model, layout, stage, of_experts=False)
    frozen_expert = frozen(model, layout, stage, of_experts=True)
    plain -= frozen_plain
    expert -= frozen_expert
    weights, gradients, optimizer = (
        part.on(layout.sharing) * plain + part.on(experts_sharing) * expert
        for part in (costs.weights, costs.gradients, costs.optimizer)
    )
    weights += costs.frozen.on(layout.sharing) * frozen_plain + costs.frozen.on(experts_sharing) * frozen_expert
    of_others = weight_count - stage.total(lambda layer: block(model, layout, layer))
    optimizer += costs.outside * of_others / (layout.sharing if costs.zero else 1)
    optimizer += costs.of_experts * expert / (experts_sharing if costs.zero else 1)
    if costs.deferred and layout.accumulation > 1:
        gradients = costs.reduced * (plain + expert)  # not sharded until the last backward pass
    held = activations(model, layout, costs, stage)
    tokens = layout.tokens(model)
    table = model.padded_vocab * model.hidden / layout.tensor
    rows = min(costs.loss_chunk or count.loss_chunk(tokens, model.padded_vocab // layout.tensor, costs.memory), tokens)
    several = rows < tokens
    largest = max(block(model, layout, layer) for layer in stage.kinds)
    # the loss holds its inputs, which tensor-parallel ranks gather, and the gradient of the inputs; with several chunks,
    # it also sums gradients of the table
    of_loss = stage.last * tokens * model.hidden * costs.element * (2 + (layout.tensor > 1) / layout.tensor)
    entries = stage.last * rows * model.padded_vocab / layout.tensor
    logits = entries * (costs.logit + costs.element * several)
    if not several:  # the table's gradient is computed from the gradients of all logits at once
        logits = max(logits, 2 * costs.element * entries + costs.table_at_once * stage.last * table)
    copied = copies(model, layout, costs, stage)
    in_backward = held + max(working(model, layout, costs, layer) for layer in stage.kinds)
    # gradients of the previous block are still being reduced when its activations are free
    saved = [block_activations(model, layout, costs, layer) for layer in stage.kinds]
    freed = 0.0 if layout.recompute == "full" else max(saved)
    prefetched = costs.gathered.sharded * largest
    prefetched += stage.last * table * costs.table / 2 * (model.tied or costs.working > 0)
    matrices = exchange(model, layout, costs.optim, costs.zero, stage)
    updating = costs.gathered.replicated * weight_count + costs.buckets + matrices.memory
    held, copied, scored = max(
        (held + of_loss, copied + stage.last * table * costs.table * several, logits),
        (in_backward, copied + prefetched, 0.0),
        (in_backward - freed, copied + prefetched + costs.working * largest, 0.0),
        (0.0, updating, 0.0),
        key=sum,
    )
    return Memory(weights, gradients, optimizer, held, copied, scored)


def copies(model: ModelConfig, layout: Layout, costs: EngineCosts, stage: Stage) -> float:
    """Cast or gathered weights while one block computes, and buckets."""
    weight_count = parameters(model, layout, stage)
    sizes = {layer: block(model, layout, layer) for layer in stage.kinds}
    others = stage.total(sizes.__getitem__) - max(sizes.values())
    at_once = max(weight_count - others, min(weight_count, costs.kept))
    gathered = costs.gathered.replicated * weight_count + costs.gathered.sharded * at_once
    return gathered + casts(model, layout, costs, stage) + costs.buckets


def working(model: ModelConfig, layout: Layout, costs: EngineCosts, layer: Layer) -> float:
    """Activations of a block in its backward pass: gradients in the MLP, and recomputed activations."""
    if layer.experts:
        rows = expert_rows(model, layout, layer.experts)
        inner = model.expert_width / (layout.tensor if layout.split_experts else 1)
        size = rows * (model.hidden + inner) * costs.element
        size += layout.tokens(model) * model.hidden * costs.element / layout.tensor
    else:
        size = layout.tokens(model) * (model.hidden + model.ffn_width) * costs.element / layout.tensor
    if layout.recompute == "full":
        size += block_activations(model, layout, costs, layer) * min(layout.recompute_every, model.layers)
    if costs.fp8:
        # the larger operand of a product exists in bf16 (scaled) and in FP8; the weights' operands are smaller, or already freed
        width = max(max(pair) for pair in count.linears(model, layer))
        size += 3 * layout.tokens(model) * width / layout.tensor
    return size


def expert_rows(model: ModelConfig, layout: Layout, experts: ExpertsConfig) -> float:
    """Rows that one GPU's experts compute in a layer: k for each token. If tensor-parallel ranks split experts, each of them computes the
    rows of all their tokens."""
    return layout.tokens(model) * experts.per_token / (1 if layout.split_experts else layout.tensor)


def activations(model: ModelConfig, layout: Layout, costs: EngineCosts, stage: Stage) -> float:
    """Activations saved for the backward pass, of all micro-batches in flight in a stage.

    Korthikanti et al. (2022), table 2, except for the scores, which flash attention does not store: for s tokens, b sequences and hidden
    width h, a layer saves 34 s b h bytes without recomputation, and only its input, 2 s b h bytes, with recomputation.
    """
    tokens = layout.tokens(model)
    line = tokens * model.hidden * costs.element / layout.tensor  # one activation between layers
    if layout.recompute == "full":
        kept = ceil(len(stage.blocks) / layout.recompute_every) * line
    else:
        kept = stage.total(lambda layer: block_activations(model, layout, costs, layer))
    first = tokens * model.hidden * bool(model.dropout) / layout.tensor + line * model.embed_norm
    # ids of 8 bytes; the last norm's input, labels
    kept += stage.first * (first + tokens * 8) + stage.last * (line + tokens * 8)
    kept += costs.staged * (not stage.last) * line
    received = costs.staged * layout.accumulation * ((not stage.first) + (not stage.last)) * line
    return micro_batches_held(layout, stage) * kept + received


def block_activations(model: ModelConfig, layout: Layout, costs: EngineCosts, layer: Layer) -> float:
    """Activations that one block saves of one micro-batch, tensor by tensor: Korthikanti et al. (2022), section 4.1.

    Split over tensor-parallel ranks, like all activations between layers: inputs and outputs of two norms, two dropout masks; the fused
    projection 3 C (C + 2 G D with grouped queries), the attention output, the MLP's inner activations; queries and keys again if they
    are normalised or rotated, and queries again if several share a key; flash attention's log-sum-exp.
    """
    c = model.hidden
    norms = 6 if model.norm_order == "sandwich" else 4  # with their outputs
    # compiled blocks save the inputs that attention and MLP gather, instead of gathering again
    norms += 2 * (layout.tensor - 1) * costs.compiled
    elements = norms * c + _of_attention(model, layout, layer.mixer)
    elements += _inner(model, costs) * (layer.experts.shared_ffn if layer.experts else model.ffn_width)
    width = elements * costs.element + 2 * c * bool(model.dropout) + 4 * model.attention.heads
    whole = model.kv_width * layout.tokens(model) * layout.context * costs.element * (layout.context > 1)
    kept = (layout.tokens(model) * width + whole) / layout.tensor
    return kept + (expert_activations(model, layout, costs, layer.experts) if layer.experts else 0.0)


def _of_attention(model: ModelConfig, layout: Layout, mixer: AttentionConfig) -> int:
    """Saved activations of attention, its output included: see block_activations()."""
    queries = mixer.heads * model.head_width
    latent = mixer.latent
    if latent.kv_rank:
        narrow = 2 * (latent.q_rank or 0) + 2 * latent.kv_rank + latent.rope_dim  # before and after their norms
        own = 0 if layout.context > 1 else queries + mixer.heads * (model.head_dim + model.value_width)
        # queries, this process's keys and what its values are a view of, and the output
        return narrow + queries + own + model.attention_width
    keys = mixer.groups * model.head_width
    again = 0
    if model.positions == "rope" or mixer.qk_norm:
        again = queries + keys
    elif mixer.groups < mixer.heads:
        again = queries
    return queries + 2 * keys + again + queries


def _inner(model: ModelConfig, costs: EngineCosts) -> int:
    """Number of saved activations of an MLP's inner width: input and output of the activation function, and with gates both factors.
    Compiled blocks recompute one of the factors. ReLU's gradient needs only the output."""
    if model.gated:
        return 3 if costs.compiled else 4
    return 1 if model.activation == "relu" else 2


def expert_activations(model: ModelConfig, layout: Layout, costs: EngineCosts, experts: ExpertsConfig) -> float:
    """Activations that router and experts save of one micro-batch: for each token its fp32 copy and scores; for each of its k rows the
    input, the inner activations, the expert's bias if any, and positions before and after the exchange.

    If tensor parallelism splits experts, each rank has whole inputs of all rows, and its part of the inner activations.
    """
    tokens = layout.tokens(model) / layout.tensor
    inner = _inner(model, costs) * model.expert_width / (layout.tensor if layout.split_experts else 1)
    row = ((1 + model.biases[2]) * model.hidden + inner) * costs.element + 8 * (2 + 2 * (layout.expert > 1))
    return tokens * (4 * model.hidden + 4 * experts.count) + expert_rows(model, layout, experts) * row


def casts(model: ModelConfig, layout: Layout, costs: EngineCosts, stage: Stage) -> float:
    """Block weights in the compute type that autograd saves from the forward to the backward pass."""
    if layout.recompute == "full":
        largest = max(block(model, layout, layer) for layer in stage.kinds)
        return costs.casts * largest * min(len(stage.blocks), layout.recompute_every)
    blocks = stage.total(lambda layer: block(model, layout, layer))
    return costs.casts * blocks * micro_batches_held(layout, stage)
