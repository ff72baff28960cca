"""The parallel layout of a run, and the contents of each pipeline stage."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from hpclm.config import ModelConfig, RunConfig
from hpclm.model import count
from hpclm.parallel.balance import balanced


@dataclass(frozen=True)
class Layout:
    """A step over data x context x pipeline x tensor GPUs, ``node`` GPUs per node. Tensor ranks are adjacent, then context ranks."""

    data: int = 1
    """Replicas, each of ``context`` ranks."""
    context: int = 1
    shard: int | None = None
    """Data-parallel ranks over which weights or optimizer state are sharded; None: all."""
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """Data-parallel ranks that divide the experts."""
    split_experts: bool = True
    """Whether each expert is split over tensor parallelism."""
    micro_size: int = 1
    accumulation: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    partition: str = "parameters"
    recompute: str = "none"
    recompute_every: int = 1
    node: int = 8

    @property
    def gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return self.ranks * self.tensor * self.pipeline

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks, which hold the same weights or shards of them."""
        return self.data * self.context

    def tokens(self, model: ModelConfig) -> int:
        """Number of tokens of a micro-batch in each rank's layers."""
        return self.micro_size * model.context // self.context

    @property
    def sharing(self) -> int:
        """Number of data-parallel ranks that together hold one copy of the sharded values."""
        return self.shard or self.ranks

    @property
    def copies(self) -> int:
        """Number of copies of the sharded values."""
        return self.ranks // self.sharing

    @property
    def of_experts(self) -> "Layout":
        """The layout for experts: only the data-parallel ranks with the same experts (Mesh.of_weights)."""
        if self.expert == 1:
            return self
        shard = 1 if self.sharing % self.expert else self.sharing // self.expert
        return replace(self, data=self.ranks // self.expert, context=1, shard=shard)


def layout_of(run: RunConfig) -> Layout:
    """The layout of a run; ConfigError if its sizes do not divide."""
    parallel = run.parallel
    engine = run.engine
    plan = run.plan(run.job.nodes * run.job.gpus)
    return Layout(
        data=plan.data,
        shard=parallel.shard_size(plan.data * parallel.context) if parallel.shard else None,
        context=parallel.context,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        expert=parallel.expert,
        split_experts=parallel.split_experts,
        micro_size=run.batch.micro_size,
        accumulation=run.batch.global_size // (run.batch.micro_size * plan.data),
        schedule=parallel.schedule,
        chunks=parallel.chunks,
        partition=parallel.partition,
        recompute=engine.recompute,
        recompute_every=engine.recompute_every,
        node=run.job.gpus,
    )


@dataclass(frozen=True)
class Stage:
    """The layers on one rank of the pipeline."""

    index: int
    blocks: int
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the head and the loss."""
    with_experts: int = 0
    """Number of blocks with experts."""

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Kinds of blocks in this stage: True with experts, False without."""
        return tuple(kind for kind in (False, True) if self.count(kind))

    def count(self, with_experts: bool) -> int:
        """Number of blocks with experts, or without experts."""
        return self.with_experts if with_experts else self.blocks - self.with_experts

    def total(self, of_block: Callable[[bool], float]) -> float:
        """Sum of ``of_block`` over all blocks. Its argument is whether a block has experts."""
        return sum(self.count(kind) * of_block(kind) for kind in self.kinds)


def stages(model: ModelConfig, layout: Layout) -> tuple[Stage, ...]:
    """The layers on every pipeline rank, in order. With several chunks, a rank holds every ``pipeline``-th stage."""
    size = layout.pipeline
    held = _blocks(model, size * layout.chunks, layout)
    mine = [[layer for part in held[i::size] for layer in part] for i in range(size)]
    return tuple(
        Stage(i, len(layers), i == 0, i == size - 1, sum(map(model.experts.in_layer, layers)))
        for i, layers in enumerate(mine)
    )


def _blocks(model: ModelConfig, parts: int, layout: Layout) -> tuple[range, ...]:
    table = model.hidden * model.padded_vocab
    kinds = [model.experts.in_layer(layer) for layer in range(model.layers)]
    if layout.partition == "blocks":
        first = 0
        last = 0
        cost = {False: 1, True: 1}
    elif layout.partition == "time":
        # attention counts too, and the embedding takes almost no time
        core = model.attention_width * model.context
        first = 0
        last = table
        cost = {kind: count.active_block(model, kind) + core for kind in (False, True)}
    else:
        first = count.embedding(model)
        last = table + count.norm(model)
        cost = {kind: count.block(model, kind) - kind * _elsewhere(model, layout) for kind in (False, True)}
    return _divided((first, *(cost[kind] for kind in kinds), last), parts)


def _elsewhere(model: ModelConfig, layout: Layout) -> int:
    """Parameters of a block's experts on other data-parallel ranks."""
    return count.experts(model) - count.experts(model) // layout.expert


@lru_cache(maxsize=512)
def _divided(costs: tuple[float, ...], parts: int) -> tuple[range, ...]:
    """Blocks of each of ``parts`` stages. ``costs``: of the layers before the first block, each block, and the layers after the last."""
    blocks = len(costs) - 2
    needed = [False, *[True] * blocks, False]
    ranges = balanced(costs, parts, needed)
    return tuple(range(max(part.start - 1, 0), min(part.stop - 1, blocks)) for part in ranges)


def parameters(model: ModelConfig, layout: Layout, stage: Stage) -> float:
    """Parameters of one GPU of a stage; a tied embedding counts twice if first and last stage differ."""
    return outside_experts(model, layout, stage) + experts(model, layout) * stage.with_experts


def outside_experts(model: ModelConfig, layout: Layout, stage: Stage) -> float:
    """Parameters of one GPU of a stage that do not belong to experts."""
    table = model.padded_vocab * model.hidden
    ends = stage.first * count.embedding(model) + stage.last * count.norm(model)
    if stage.last and not (model.tied and stage.first):
        ends += table
    whole = count.unsplit(model, stage.blocks, stage.first, stage.last, stage.with_experts)
    blocks = stage.total(lambda kind: count.block(model, kind)) - stage.with_experts * count.experts(model)
    return (blocks + ends - whole) / layout.tensor + whole


def experts(model: ModelConfig, layout: Layout) -> float:
    """Parameters of one block's experts on one GPU."""
    whole = count.unsplit_experts(model) if layout.split_experts else count.experts(model)
    return ((count.experts(model) - whole) / layout.tensor + whole) / layout.expert


def block(model: ModelConfig, layout: Layout, with_experts: bool) -> float:
    """Parameters of one block on one GPU, treating all non-expert parameters as divided over tensor parallelism."""
    outside = count.block(model, with_experts) - with_experts * count.experts(model)
    return outside / layout.tensor + with_experts * experts(model, layout)


def micro_batches_held(layout: Layout, stage: Stage) -> float:
    """Largest number of micro-batches with activations in a stage at once.

    1F1B: the number of stages from here to the end (Narayanan et al. 2021, section 2.2); GPipe: all of them; interleaved: 1 + (p - 1) /
    (p v) times as many as 1F1B's in the first stage (Korthikanti et al. 2022, section 4.2.3).
    """
    p = layout.pipeline
    v = layout.chunks
    m = layout.accumulation
    if p == 1:
        return 1
    if layout.schedule == "gpipe":
        return m
    if v > 1:
        return min(m, (2 * (p - stage.index - 1) + (v - 1) * p + 1) / v)
    return min(m, p - stage.index)
