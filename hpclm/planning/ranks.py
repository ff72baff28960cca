"""A report on single ranks of a run of any size, simulated on this machine: the memory of each, and its communication."""

from collections.abc import Iterator, Sequence

from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig
from hpclm.node.gpus import Kind
from hpclm.planning import suggest
from hpclm.planning.simulate import CollectiveTotal, Simulation, simulate

GB = 1e9


def parse_ranks(text: str, world: int) -> list[int]:
    """The ranks in ``0,8-11,511``, in order; ConfigError for other text."""
    ranks: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.strip().partition("-")
            ranks |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ConfigError(f"--ranks={text} must be ranks such as 0,511 or 0-3") from None
    if not ranks or min(ranks) < 0 or max(ranks) >= world:
        raise ConfigError(f"--ranks={text}: the {world} processes of this run have the ranks 0 to {world - 1}")
    return sorted(ranks)


def report(run: RunConfig, ranks: Sequence[int], kind: Kind) -> Iterator[str]:
    """Lines about each of these ranks. ``kind``: the kind of GPU for batch.micro_size=auto."""
    run = suggest.with_micro_size(run, kind)
    for number, rank in enumerate(ranks):
        if number:
            yield ""
        yield from lines(simulate(run, rank))


def lines(rank: Simulation) -> Iterator[str]:
    """The report on one rank."""
    run = rank.run
    micro_batches = "micro-batch" if rank.micro_batches == 1 else "micro-batches"
    yield (
        f"rank {rank.rank} of {rank.world}: engine {run.engine.name}, {rank.micro_batches} {micro_batches} of "
        f"{run.batch.micro_size} x {run.model.context} tokens"
    )
    yield f"  parameters       {rank.parameters:>15,}, of which it updates {rank.updated:,}"
    yield "  peak memory of a step, uncompiled, GB"
    for part, size in rank.memory.items():
        yield f"    {part:<14}{size / GB:>12.3f}"
    yield f"    {'total':<14}{sum(rank.memory.values()) / GB:>12.3f}"
    yield f"  collectives of a step{'' if rank.collectives else ': none'}"
    yield from map(_line, rank.collectives)


def _line(total: CollectiveTotal) -> str:
    return (
        f"    {total.count:>7,} x {total.kind:<15} over {total.group:<10} ({total.size:>4} ranks) "
        f"{_bytes(total.bytes / total.count):>9} each, {_bytes(total.bytes):>9} in total"
    )


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"
