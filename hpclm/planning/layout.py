"""The parallel layout of a run, and the contents of each pipeline stage."""

from dataclasses import dataclass
from functools import lru_cache

from hpclm.config import ModelConfig, RunConfig
from hpclm.model import count
from hpclm.parallel.balance import balanced


@dataclass(frozen=True)
class Layout:
    """A step over data x context x pipeline x tensor GPUs, ``node`` of them per node; tensor ranks are adjacent, then context."""

    data: int = 1
    """Replicas, each of ``context`` ranks."""
    context: int = 1
    shard: int | None = None
    """Data-parallel ranks that weights or optimizer state are sharded over; None: all."""
    tensor: int = 1
    pipeline: int = 1
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
        """Number of GPUs."""
        return self.ranks * self.tensor * self.pipeline

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks: those that hold the same weights, or shards of them."""
        return self.data * self.context

    def tokens(self, model: ModelConfig) -> int:
        """Tokens of a micro-batch that each rank's layers see."""
        return self.micro_size * model.context // self.context

    @property
    def sharing(self) -> int:
        """Number of data-parallel ranks that together hold one copy of what is sharded."""
        return self.shard or self.ranks

    @property
    def copies(self) -> int:
        """Number of such copies."""
        return self.ranks // self.sharing


def of(run: RunConfig) -> Layout:
    """The layout of a run; ConfigError if its sizes do not divide."""
    parallel, engine = run.parallel, run.engine
    plan = run.plan(run.job.nodes * run.job.gpus)
    return Layout(
        data=plan.data,
        shard=parallel.shard_size(plan.data * parallel.context) if parallel.shard else None,
        context=parallel.context,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
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


def stages(model: ModelConfig, layout: Layout) -> tuple[Stage, ...]:
    """The layers on every pipeline rank, in order. With several chunks, a rank holds every ``pipeline``-th stage."""
    size = layout.pipeline
    held = _blocks(model, size * layout.chunks, layout.partition)
    return tuple(Stage(i, sum(held[i::size]), i == 0, i == size - 1) for i in range(size))


def _blocks(model: ModelConfig, parts: int, by: str) -> tuple[int, ...]:
    """Blocks of each of ``parts`` stages."""
    table, block = model.hidden * model.padded_vocab, count.block(model)
    costs = {
        "blocks": (0, 1, 0),
        # attention counts too, and the embedding takes almost no time
        "time": (0, block + model.attention_width * model.context, table),
        "parameters": (count.embedding(model), block, table + count.norm(model)),
    }
    return _divided(*costs[by], model.layers, parts)


@lru_cache(maxsize=512)
def _divided(first: int, block: int, last: int, blocks: int, parts: int) -> tuple[int, ...]:
    """Blocks of each of ``parts`` stages, whose costs are as even as can be."""
    needed = [False, *[True] * blocks, False]
    ranges = balanced([first, *[block] * blocks, last], parts, needed)
    return tuple(sum(needed[i] for i in part) for part in ranges)


def parameters(model: ModelConfig, layout: Layout, stage: Stage) -> float:
    """Parameters of one GPU of a stage; a tied embedding counts twice if first and last stage differ."""
    table = model.padded_vocab * model.hidden
    ends = stage.first * count.embedding(model) + stage.last * count.norm(model)
    if stage.last and not (model.tied and stage.first):
        ends += table
    whole = count.unsplit(model, stage.blocks, stage.first, stage.last)
    return (stage.blocks * count.block(model) + ends - whole) / layout.tensor + whole


def micro_batches_held(layout: Layout, stage: Stage) -> float:
    """Largest number of micro-batches whose activations a stage holds at once.

    1F1B: as many as there are stages from here to the end (Narayanan et al. 2021, section 2.2); GPipe: all of them;
    interleaved: 1 + (p - 1) / (p v) times as many as 1F1B's in the first stage (Korthikanti et al. 2022, section 4.2.3).
    """
    p, v, m = layout.pipeline, layout.chunks, layout.accumulation
    if p == 1:
        return 1
    if layout.schedule == "gpipe":
        return m
    if v > 1:
        return min(m, (2 * (p - stage.index - 1) + (v - 1) * p + 1) / v)
    return min(m, p - stage.index)
