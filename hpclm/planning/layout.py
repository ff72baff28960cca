"""The parallel layout of a run, and the contents of each pipeline stage."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hpclm.config import ModelConfig, RunConfig
from hpclm.config.layer import Layer
from hpclm.model import weights
from hpclm.model.weights import Weight
from hpclm.parallel.partition import balanced


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
    numbers: tuple[int, ...]
    """The numbers of its blocks."""
    blocks: tuple[Layer, ...]
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the head and the loss."""

    @cached_property
    def kinds(self) -> Mapping[Layer, int]:
        """The different blocks, and how many of each there are."""
        return Counter(self.blocks)

    def total(self, of_block: Callable[[Layer], float]) -> float:
        """Sum of ``of_block`` over all blocks."""
        return sum(number * of_block(layer) for layer, number in self.kinds.items())

    @property
    def with_experts(self) -> int:
        """Number of blocks with experts."""
        return sum(layer.experts is not None for layer in self.blocks)


def stages(model: ModelConfig, layout: Layout) -> tuple[Stage, ...]:
    """The layers on every pipeline rank, in order. With several chunks, a rank holds every ``pipeline``-th stage."""
    size = layout.pipeline
    held = _blocks(model, size * layout.chunks, layout)
    mine = [[layer for part in held[i::size] for layer in part] for i in range(size)]
    return tuple(
        Stage(i, tuple(layers), tuple(model.blocks[layer] for layer in layers), i == 0, i == size - 1)
        for i, layers in enumerate(mine)
    )


def _blocks(model: ModelConfig, parts: int, layout: Layout) -> tuple[range, ...]:
    table = model.hidden * model.padded_vocab
    first: float = 0
    last: float = 0
    if layout.partition == "blocks":
        cost = dict.fromkeys(model.blocks, 1.0)
    else:
        undivided = replace(layout, tensor=1)
        first = sum(weight.size for _, weight in weights.before_blocks(model))
        last = table + sum(weight.size for _, weight in weights.norm(model, model.hidden))
        cost = {layer: block(model, undivided, layer) for layer in set(model.blocks)}
    return _divided((first, *(cost[layer] for layer in model.blocks), last), parts)


@lru_cache(maxsize=512)
def _divided(costs: tuple[float, ...], parts: int) -> tuple[range, ...]:
    """Blocks of each of ``parts`` stages. ``costs``: the cost of the layers before the first block, of each block, and of the layers after
    the last one."""
    blocks = len(costs) - 2
    needed = [False, *[True] * blocks, False]
    ranges = balanced(costs, parts, needed)
    return tuple(range(max(part.start - 1, 0), min(part.stop - 1, blocks)) for part in ranges)


def parameters(model: ModelConfig, layout: Layout, stage: Stage) -> float:
    """Parameters of one GPU of a stage; a tied embedding counts twice if first and last stage differ."""
    return outside_experts(model, layout, stage) + experts(model, layout, stage)


def outside_experts(model: ModelConfig, layout: Layout, stage: Stage) -> float:
    """Parameters of one GPU of a stage that do not belong to experts."""
    blocks = stage.total(lambda layer: _held(model, layout, layer, of_experts=False))
    return blocks + sum(weight.on(layout.tensor) for _, weight in ends(model, stage))


def ends(model: ModelConfig, stage: Stage) -> Iterator[tuple[str, Weight]]:
    """The weights of a stage outside its blocks, by name; a tied embedding once on each stage that has it."""
    if stage.first:
        yield from weights.before_blocks(model)
    if stage.last:
        yield from weights.after_blocks(model)
        if model.tied and not stage.first:
            yield from ((f"tokens.{name}", weight) for name, weight in weights.vocabulary(model))


def frozen(model: ModelConfig, layout: Layout, stage: Stage, of_experts: bool) -> float:
    """Parameters of one GPU of a stage that model.freeze matches: those of experts, or all others."""
    if not model.freeze:
        return 0.0
    named = [] if of_experts else [*ends(model, stage)]
    for number, layer in zip(stage.numbers, stage.blocks, strict=True):
        table = weights.of_block(model, layer, layout.split_experts)
        named += [
            (f"block{number}.{name}", weight) for name, weight in table.items() if bool(weight.stack) == of_experts
        ]
    return sum(weight.on(layout.tensor, layout.expert) for name, weight in named if model.freezes(name))


def experts(model: ModelConfig, layout: Layout, stage: Stage) -> float:
    """Parameters of the experts of a stage on one GPU."""
    return stage.total(lambda layer: _held(model, layout, layer, of_experts=True))


def block(model: ModelConfig, layout: Layout, layer: Layer) -> float:
    """Parameters of one block on one GPU."""
    return sum(_held(model, layout, layer, of_experts) for of_experts in (False, True))


def _held(model: ModelConfig, layout: Layout, layer: Layer, of_experts: bool) -> float:
    table = weights.of_block(model, layer, layout.split_experts)
    return sum(w.on(layout.tensor, layout.expert) for w in table.values() if bool(w.stack) == of_experts)


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
