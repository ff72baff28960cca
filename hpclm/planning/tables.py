"""Present forecasts and suggested layouts: as values for programs and as tables for people."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig
from hpclm.config.phases import Timeline
from hpclm.model import count
from hpclm.node import environment
from hpclm.node.gpus import Kind, kind_named
from hpclm.planning import forecast, optimizer, suggest, time
from hpclm.planning.engines import zero_stage
from hpclm.planning.forecast import GIB, Forecast
from hpclm.planning.memory import Memory

GPUS = ((1, 1), (1, 8), (2, 8), (4, 8), (8, 8))
"""Pairs (nodes, GPUs per node) that a table of several files tries in this order."""
SHOWN = 10  # suggestions


def with_micro_size(run: RunConfig, kind: Kind) -> RunConfig:
    """``run`` with a number for batch.micro_size=auto: the size that training would choose, or 1 if no size fits."""
    try:
        return suggest.with_micro_size(run, kind)
    except ConfigError:
        return replace(run, batch=replace(run.batch, micro_size=1))


def longest_phase(run: RunConfig) -> tuple[int, RunConfig]:
    """The phase with the longest samples, which need the most memory: its number, 0 for the one before data.phases, and its settings."""
    return max(enumerate(Timeline(run).settings), key=lambda item: item[1].model.context)


def on_its_gpus(settings: Sequence[str], kind: Kind) -> Forecast | ConfigError:
    """The forecast of a run on its GPUs. If its settings have no number of GPUs, on the smallest of GPUS where it fits."""
    outcome: Forecast | ConfigError | None = None
    try:
        _, run = longest_phase(environment.settings_with_site(settings))
    except ConfigError as error:
        return error
    for nodes, gpus in GPUS if (run.job.nodes, run.job.gpus) == (1, 1) else [(run.job.nodes, run.job.gpus)]:
        try:
            other = replace(run, job=replace(run.job, nodes=nodes, gpus=gpus))
            outcome = forecast.predict(with_micro_size(other, kind), kind)
        except ConfigError as error:
            outcome = outcome or error
            continue
        if outcome.room == "fits":
            break
    assert outcome is not None
    return outcome


def kind_of(name: str, memory: float | None = None, network: float | None = None) -> Kind:
    """The kind of GPU with this name, ignoring case; ConfigError if unknown. ``memory`` (GiB) and ``network`` (GB/s) replace its values."""
    kind = kind_named(name)
    return replace(kind, memory=memory or kind.memory, network=(network or kind.network / 1e9) * 1e9)


def facts(plan: Forecast) -> dict[str, Any]:
    """A forecast as plain values, in bytes and seconds."""
    return {
        "parameters": count.parameters(plan.model),
        "active_parameters": count.active_parameters(plan.model),
        "layout": asdict(plan.layout),
        "memory": [{**asdict(part), "overhead": part.overhead, "total": part.total} for part in plan.memory],
        "available": plan.kind.memory * GIB,
        "verdict": plan.room,
        "bubble": time.bubble(plan.layout),
        "sent": asdict(plan.volume),
        "step": plan.step and {**asdict(plan.step), "total": plan.step.total},
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "hfu": plan.hfu,
    }


def comparison(plans: Mapping[str, Forecast | ConfigError], kind: str) -> Iterator[str]:
    """Memory and speed of each settings file, a line each."""
    width = max(map(len, plans)) + 2
    yield f"{'on ' + kind:<{width}}{'parameters':>16}{'GPUs':>6}{'micro':>7}{'GiB':>8}{'tokens/s a GPU':>16}{'MFU':>8}"
    for path, plan in plans.items():
        if isinstance(plan, ConfigError):
            yield f"{path:<{width}}{plan.problems[0]}"
            continue
        layout = plan.layout
        rate = plan.tokens_per_second
        speed = f"{rate / layout.gpus:>16,.0f}{plan.mfu or 0:>8.1%}" if rate else f"{'-':>16}{'-':>8}"
        room = "" if plan.room == "fits" else f"  {plan.room}"
        sizes = (
            f"{count.parameters(plan.model):>16,}{layout.gpus:>6}{layout.micro_size:>7}{plan.peak.total / GIB:>8.1f}"
        )
        yield f"{path:<{width}}{sizes}{speed}{room}"


def report(run: RunConfig, plan: Forecast, kind: str) -> Iterator[str]:
    """The lines of a forecast."""
    model = plan.model
    layout = plan.layout
    context = f"context {layout.context} x " if layout.context > 1 else ""
    experts = f"; experts over {layout.expert} data ranks" if layout.expert > 1 else ""
    micro_batches = "micro-batch" if layout.accumulation == 1 else "micro-batches"
    groups = f" in groups of {layout.sharing} replicas" if layout.copies > 1 else ""
    yield f"{count.described_size(model)}: {model.layers} blocks of width {model.hidden}, samples of {model.context} tokens"
    yield (
        f"{layout.gpus} x {kind}: data {layout.data} x {context}pipeline {layout.pipeline} x tensor {layout.tensor}{experts}; engine "
        f"{run.engine.name}, ZeRO stage {zero_stage(run.engine, layout.pipeline)}{groups}, recompute {layout.recompute}"
    )
    yield (
        f"{plan.samples} samples a step: {layout.accumulation} {micro_batches} of {layout.micro_size} on each replica"
    )
    if model.head_width % 8:
        yield (
            f"a head is {model.head_width} wide; tensor cores need a multiple of 8; other widths were measured to be a third "
            f"slower than estimated below"
        )
    if assumption := optimizer.assumed(run.optim):
        yield assumption
    yield ""
    yield from _memory(plan)
    yield ""
    yield from _speed(plan)


def _memory(plan: Forecast) -> Iterator[str]:
    last = len(plan.memory) - 1
    shown = sorted({0, plan.worst, last})
    names = [f"stage {i + 1}" if last else "GiB" for i in shown]
    yield f"{'memory of a GPU, GiB' if last else 'memory of a GPU':<22}" + "".join(f"{name:>10}" for name in names)
    rows = [
        f"  {name:<20}" + "".join(f"{getattr(plan.memory[i], name) / GIB:>10.2f}" for i in shown)
        for name in (*(part.name for part in fields(Memory)), "overhead", "total")
    ]
    yield from rows[:-1]
    at = f", at stage {plan.worst + 1} of {last + 1}" if last else ""
    yield f"{rows[-1]}   of {plan.kind.memory:g}{at}: {plan.room}"


def _speed(plan: Forecast) -> Iterator[str]:
    layout = plan.layout
    sent = asdict(plan.volume)
    step = plan.step
    if step is None:
        why = "set engine.precision to bf16 or fp16"
        if plan.costs.element <= 2:
            optim = plan.costs.optim.name
            why = f"optim.name={optim} exchanges matrices in fp32, unless its row in OPTIMIZERS declares a cost in another type"
        yield f"speed is not predicted in fp32; {why}"
        return
    yield f"{'a step':<22}{'ms':>10}{'GiB sent':>12}"
    for name, seconds in asdict(step).items():
        if seconds or sent.get(name):
            volume = f"{sent[name] / GIB:>12.2f}" if sent.get(name) else ""
            yield f"  {name:<20}{seconds * 1000:>10.1f}{volume}"
    yield f"  {'total':<20}{step.total * 1000:>10.1f}"
    yield ""
    if layout.pipeline > 1:
        yield f"bubble of equal stages {time.bubble(layout):.1%}"
    rate = plan.tokens_per_second or 0.0
    again = f", HFU {plan.hfu:.1%}" if plan.hfu != plan.mfu else ""
    yield f"{rate:,.0f} tokens/s, {rate / layout.gpus:,.0f} of each GPU: MFU {plan.mfu:.1%}{again}"


def ranking(run: RunConfig, best: Sequence[suggest.Suggestion], kind: str) -> Iterator[str]:
    """The table of suggested layouts."""
    gpus = run.job.nodes * run.job.gpus
    if not best:
        yield f"no layout fits {gpus} x {kind}; use more GPUs, or a smaller model.context"
        return
    yield f"{len(best)} layouts fit {gpus} x {kind}; the fastest, each with its best micro-batch:"
    yield f"{'tokens/s':>12}{'MFU':>8}{'GiB':>7}  settings"
    for one in best[:SHOWN]:
        settings = " ".join(one.options) or "(as given)"
        yield f"{one.speed:>12,.0f}{one.forecast.mfu or 0:>8.1%}{one.forecast.peak.total / GIB:>7.1f}  {settings}"
