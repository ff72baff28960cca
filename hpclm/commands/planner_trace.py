"""``hpclm planner --trace``: what a whole optimizer step costs on a GPU, operation by operation, without a GPU."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpclm.config import RunConfig
from hpclm.config.supports import SUPPORTS
from hpclm.node.gpus import Kind
from hpclm.planning import fusion, graphs, roofline, trace
from hpclm.planning.fusion import Kernel
from hpclm.planning.graphs import Graphs
from hpclm.planning.roofline import Times
from hpclm.planning.trace import Trace

KEYS: dict[str, Callable[[Kernel], str]] = {
    "part": lambda kernel: kernel.part,
    "line": lambda kernel: str(kernel.place),
    "op": lambda kernel: kernel.name,
}
"""What --by sums up by."""


@dataclass(frozen=True)
class Traced:
    """A traced step, and what it costs on a kind of GPU."""

    trace: Trace
    kernels: list[Kernel]
    times: Times
    gpu: Kind

    @classmethod
    def of(cls, run: RunConfig, gpu: Kind, compiled: bool, rank: int) -> "Traced":
        """Trace one step of ``run``, compiled or not."""
        found = trace.of(replace(run, engine=replace(run.engine, compile=compiled)), rank)
        kernels = fusion.kernels(found.operations)
        replicas = found.world // run.parallel.model
        return cls(found, kernels, roofline.times(kernels, found.run, replicas, found.micro_batches, gpu), gpu)

    def rate(self, seconds: float) -> tuple[float, float]:
        """Tokens per second and MFU of one GPU, if a step takes ``seconds``."""
        tokens = self.trace.tokens / seconds / self.trace.run.parallel.model
        return tokens, roofline.utilization(self.trace.run.model, tokens, self.gpu)


def main(run: RunConfig, gpu: Kind, name: str, by: str, top: int, rank: int) -> tuple[dict[str, Any], Iterator[str]]:
    """The trace as plain values, and as the lines of a report."""
    ways = {"eager": Traced.of(run, gpu, False, rank)}
    found = None
    if "compile" in SUPPORTS[run.engine.name].options if run.engine.name in SUPPORTS else True:
        ways["compiled"] = Traced.of(run, gpu, True, rank)
        found = graphs.of(run) if run.engine.name != "deepspeed" else None
    shown = ways["compiled" if run.engine.compile and "compiled" in ways else "eager"]
    return facts(ways, shown, found, by), report(ways, shown, found, name, by, top)


def facts(ways: dict[str, Traced], shown: Traced, compiled: Graphs | None, by: str) -> dict[str, Any]:
    """Everything in bytes and seconds."""
    least = roofline.least_bytes(
        shown.trace.run, shown.trace.world // shown.trace.run.parallel.model, shown.trace.micro_batches
    )
    return {
        "tokens": shown.trace.tokens,
        "micro_batches": shown.trace.micro_batches,
        "steps": {
            way: {**asdict(one.times), "total": one.times.total, "moved": roofline.moved(one.kernels), **speed(one, one.times.total)}
            for way, one in ways.items()
        },
        "ideal": {"seconds": shown.times.ideal, "moved": least, **speed(shown, shown.times.ideal)},
        "limit": {"seconds": shown.times.limit, **speed(shown, shown.times.limit)},
        "kernels": sum(one.launches * one.count for one in shown.kernels),
        "waits": [{"what": e.what, "line": str(e.place), "count": n} for e, n in shown.trace.waits],
        "seeds": [{"what": e.what, "line": str(e.place), "count": n} for e, n in shown.trace.seeds],
        "collectives": shown.trace.collectives,
        "sent": shown.trace.sent,
        "memory": shown.trace.memory,
        "graphs": compiled and asdict(compiled),
        by: rows(shown, by),
    }  # fmt: skip


def speed(traced: Traced, seconds: float) -> dict[str, float]:
    """Tokens per second of one GPU, and MFU."""
    rate, used = traced.rate(seconds)
    return {"tokens_per_second": rate, "mfu": used}


def rows(traced: Traced, by: str) -> list[dict[str, Any]]:
    """Kernels summed up, the slowest first."""
    found: dict[str, dict[str, Any]] = defaultdict(lambda: dict(kernels=0, read=0, written=0, flops=0.0, seconds=0.0))
    for one in traced.kernels:
        row = found[KEYS[by](one)]
        row["kernels"] += one.launches * one.count
        for name in ("read", "written", "flops"):
            row[name] += getattr(one, name) * one.count
        row["seconds"] += roofline.seconds(one, traced.gpu) * one.count
    return sorted(({by: key, **row} for key, row in found.items()), key=lambda row: -row["seconds"])


def report(
    ways: dict[str, Traced], shown: Traced, compiled: Graphs | None, name: str, by: str, top: int
) -> Iterator[str]:
    """The trace for a reader."""
    found = shown.trace
    sizes = f"{found.micro_batches} micro-batch{'es' * (found.micro_batches > 1)} of {found.run.batch.micro_size}"
    yield f"one optimizer step of rank {found.rank} of {found.world}: {sizes} x {found.run.model.context} tokens, on {name}"
    yield f"engine {found.run.engine.name}, {'compiled' if found.run.engine.compile else 'eager'}"
    yield ""
    yield f"{'':<22}{'ms':>10}{'tokens/s':>12}{'MFU':>8}   of each GPU"
    lines = [(way, one, one.times.total) for way, one in ways.items()]
    lines += [("ideal fusion", shown, shown.times.ideal), ("products, attention", shown, shown.times.limit)]
    for label, one, seconds in lines:
        rate, used = one.rate(seconds)
        yield f"{label:<22}{seconds * 1000:>10.1f}{rate:>12,.0f}{used:>8.1%}"
    yield ""
    yield f"{by:<34}{'kernels':>9}{'GB read':>10}{'written':>10}{'TFLOP':>9}{'ms':>9}"
    all_rows = rows(shown, by)
    for row in all_rows[:top]:
        yield (
            f"{row[by][:33]:<34}{row['kernels']:>9,}{row['read'] / 1e9:>10.2f}{row['written'] / 1e9:>10.2f}"
            f"{row['flops'] / 1e12:>9.2f}{row['seconds'] * 1000:>9.2f}"
        )
    if len(all_rows) > top:
        yield f"... and {len(all_rows) - top} more; --top {len(all_rows)} shows all"
    least = shown.times.least * 1000
    yield f"besides products and attention: {shown.times.memory * 1000:.1f} ms, with ideal fusion {least:.1f} ms"
    yield ""
    yield from _counts(shown, compiled)


def _counts(shown: Traced, compiled: Graphs | None) -> Iterator[str]:
    """Kernel launches, waits, seeds, collectives and graphs."""
    launches = sum(one.launches * one.count for one in shown.kernels)
    yield f"kernels launched: {launches:,}, which takes the host {shown.times.host * 1000:.0f} ms"
    for label, events in (("host waits for the device", shown.trace.waits), ("generators seeded", shown.trace.seeds)):
        places: dict[str, int] = defaultdict(int)
        for event, count in events:
            places[f"{event.what} at {event.place}"] += count
        listed = ", ".join(f"{what}{f' ({times} times)' * (times > 1)}" for what, times in list(places.items())[:6])
        yield f"{label}: {sum(places.values())}{': ' * bool(listed)}{listed}"
    for row in shown.trace.collectives:
        where = "CPU memory" if row["on_host"] else "GPU memory"
        yield (
            f"{row['count']} x {row['kind']} over {row['group']} ({row['size']} ranks) in {where}: {row['bytes'] / 1e9:.3f} GB"
        )
    if compiled:
        yield f"torch.compile: {compiled.blocks} graph{'s' * (compiled.blocks != 1)} for all blocks, {len(compiled.breaks)} graph breaks"
        yield from (f"  {reason}" for reason in sorted(set(compiled.breaks)))
