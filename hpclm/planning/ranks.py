"""Single ranks of a run of any size, built and traced on this machine: what each holds, and what it says to the others."""

from collections.abc import Iterator, Sequence
from typing import Any

from hpclm.config import RunConfig
from hpclm.errors import ConfigError
from hpclm.node.gpus import Kind
from hpclm.planning import suggest, trace
from hpclm.planning.trace import Trace

GB = 1e9


def chosen(text: str, world: int) -> list[int]:
    """The ranks in ``0,8-11,511``, in order; ConfigError."""
    found: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.strip().partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ConfigError(f"--ranks={text} must be ranks such as 0,511 or 0-3") from None
    outside = [rank for rank in found if not 0 <= rank < world]
    if outside or not found:
        raise ConfigError(f"--ranks={text}: the {world} processes of this run have the ranks 0 to {world - 1}")
    return sorted(found)


def report(run: RunConfig, numbers: Sequence[int], kind: Kind) -> Iterator[str]:
    """Lines about each of these ranks. ``kind``: for batch.micro_size=auto."""
    run = suggest.with_micro_size(run, kind)
    for index, rank in enumerate(numbers):
        if index:
            yield ""
        yield from lines(trace.of(run, rank))


def lines(found: Trace) -> Iterator[str]:
    """A traced rank for a reader."""
    run = found.run
    several = "es" * (found.micro_batches > 1)
    yield (
        f"rank {found.rank} of {found.world}: engine {run.engine.name}, {found.micro_batches} micro-batch{several} of "
        f"{run.batch.micro_size} x {run.model.context} tokens"
    )
    yield f"  parameters       {found.parameters:>15,}, of which it updates {found.updated:,}"
    yield "  memory at the fullest moment of a step, GB"
    for part, size in found.memory.items():
        yield f"    {part:<14}{size / GB:>12.3f}"
    yield f"    {'total':<14}{sum(found.memory.values()) / GB:>12.3f}"
    rows = found.collectives
    yield f"  collectives of a step{'' if rows else ': none'}"
    yield from (f"    {_collective(row)}" for row in rows)


def _collective(row: dict[str, Any]) -> str:
    where = ", in CPU memory" if row["on_host"] else ""
    size = row["bytes"] / row["count"]
    return (
        f"{row['count']:>7,} x {row['kind']:<15} over {row['group']:<10} ({row['size']:>4} ranks) {_bytes(size):>9} each, "
        f"{_bytes(row['bytes']):>9} together{where}"
    )


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"
