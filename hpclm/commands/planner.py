"""The verb ``hpclm planner``: expected memory and speed of a run, and layouts that fit."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from hpclm import cli
from hpclm.config import RunConfig
from hpclm.config.compose import is_override
from hpclm.errors import ConfigError
from hpclm.model import count
from hpclm.node.gpus import KINDS, Kind, known
from hpclm.planning import forecast, suggest, time
from hpclm.planning.code import zero_stage
from hpclm.planning.forecast import GIB, Forecast
from hpclm.planning.memory import Memory
from hpclm.terminal import say

GPUS = ((1, 1), (1, 8), (2, 8), (4, 8), (8, 8))
"""Nodes, and GPUs of each, that a table of several files tries in this order."""
SHOWN = 10  # suggestions, where no number is given


def main(argv: list[str]) -> int:
    """``hpclm planner``."""
    args = _parser().parse_intermixed_args(_with_count(argv))
    words = [*args.settings]
    words += [f"job.{name}={value}" for name in ("nodes", "gpus") if (value := getattr(args, name)) is not None]
    kind = kind_of(args.gpus_kind, args.memory, args.network)
    files = [word for word in words if not is_override(word)]
    if len(files) > 1:
        return _compare(args, files, [word for word in words if is_override(word)], kind)
    run = cli.settings(words)
    if args.suggest is None:
        run = _with_micro_size(run, kind)
    if args.trace:
        return _trace(args, run, kind)
    if args.suggest is None:
        found = forecast.of(run, kind)
        say(json.dumps(facts(found), indent=1) if args.json else "\n".join(report(run, found, args.gpus_kind)))
        return 0
    if args.suggest < 1:
        raise ConfigError(f"--suggest={args.suggest} must be at least 1")
    best = suggest.ranked(run, kind)
    shown = best[: args.suggest]
    if args.json:
        print(json.dumps([{"settings": s.words, **facts(s.forecast)} for s in shown], indent=1))
    else:
        say("\n".join([*ranking(run, shown, len(best), args.gpus_kind), *_doubling(shown[:1], kind)]))
    return 0 if best else 1


def _compare(args: argparse.Namespace, files: Sequence[str], overrides: list[str], kind: Kind) -> int:
    """A table of several settings files."""
    if args.suggest is not None or args.trace:
        raise ConfigError(f"give one settings file with --suggest or --trace, not {len(files)}: {', '.join(files)}")
    found: dict[str, Forecast | ConfigError] = {}
    for path in files:
        try:
            found[path] = _on_its_gpus(cli.settings([path, *overrides]), kind)
        except ConfigError as error:
            found[path] = error
    if args.json:
        rows = {
            path: {"error": str(one)} if isinstance(one, ConfigError) else facts(one) for path, one in found.items()
        }
        say(json.dumps(rows, indent=1))
    else:
        say("\n".join(comparison(found, args.gpus_kind)))
    return 0


def _on_its_gpus(run: RunConfig, kind: Kind) -> Forecast:
    """The forecast of a run; if its settings name no number of GPUs, on the smallest of GPUS that it fits."""
    sizes = GPUS if (run.job.nodes, run.job.gpus) == (1, 1) else ((run.job.nodes, run.job.gpus),)
    found: list[Forecast] = []
    problem: ConfigError | None = None
    for nodes, gpus in sizes:
        try:
            other = replace(run, job=replace(run.job, nodes=nodes, gpus=gpus))
            found.append(forecast.of(_with_micro_size(other, kind), kind))
        except ConfigError as error:
            problem = problem or error
            continue
        if found[-1].room == "fits":
            break
    if problem and not found:
        raise problem
    return found[-1]


def comparison(found: Mapping[str, Forecast | ConfigError], kind: str) -> Iterator[str]:
    """Memory and speed of each settings file, a line each."""
    width = max(map(len, found)) + 2
    yield f"{'on ' + kind:<{width}}{'parameters':>16}{'GPUs':>6}{'micro':>7}{'GiB':>8}{'tokens/s a GPU':>16}{'MFU':>8}"
    for path, one in found.items():
        if isinstance(one, ConfigError):
            yield f"{path:<{width}}{one.problems[0]}"
            continue
        need = one.memory[one.worst].total / GIB
        speed = f"{'-':>16}{'-':>8}"
        if one.tokens_per_second:
            speed = f"{one.tokens_per_second / one.layout.gpus:>16,.0f}{one.mfu or 0:>8.1%}"
        room = "" if one.room == "fits" else f"  {one.room}"
        yield (
            f"{path:<{width}}{count.parameters(one.model):>16,}{one.layout.gpus:>6}{one.layout.micro_size:>7}{need:>8.1f}"
            f"{speed}{room}"
        )


def _with_micro_size(run: RunConfig, kind: Kind) -> RunConfig:
    """``run`` with a number for batch.micro_size=auto: the one that training would choose, or 1 if none fits."""
    try:
        return suggest.with_micro_size(run, kind)
    except ConfigError:
        return replace(run, batch=replace(run.batch, micro_size=1))


def _trace(args: argparse.Namespace, run: RunConfig, kind: Kind) -> int:
    """``--trace``."""
    if args.top < 1:
        raise ConfigError(f"--top={args.top} must be at least 1")
    from hpclm.commands import planner_trace  # it loads torch

    found, lines = planner_trace.main(run, kind, args.gpus_kind, args.by, args.top, args.rank)
    say(json.dumps(found, indent=1) if args.json else "\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="hpclm planner",
        description="Estimate the memory that a run needs on each GPU, and its speed. Nothing is started.",
        epilog=f"kinds of GPUs: {', '.join(KINDS)}\nexit codes: 0 done · 1 no layout fits · 2 wrong arguments · 64 wrong settings",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "settings",
        nargs="*",
        metavar="FILE | key=value",
        help="one settings file, or several to compare, and overrides",
    )
    add("--gpus-kind", default="H100", metavar="KIND", help="kind of GPU (H100)")
    add("--nodes", "-N", metavar="N", help="nodes, short for job.nodes")
    add("--gpus", metavar="N", help="GPUs of each node, short for job.gpus")
    add("--memory", type=float, metavar="GIB", help="memory of a GPU, if it differs from the default of its kind")
    add("--network", type=float, metavar="GB/S", help="gigabytes/s to other nodes for each GPU, in one direction")
    add("--suggest", type=int, metavar="N", help="the N fastest layouts that fit (10), and their settings")
    add(
        "--trace",
        action="store_true",
        help="trace a whole optimizer step, operation by operation; needs PyTorch, no GPU",
    )
    add(
        "--by",
        choices=("part", "line", "op"),
        default="part",
        help="with --trace: sum up by part, source line or operation",
    )
    add("--top", type=int, default=25, metavar="N", help="with --trace: rows to print (25)")
    add("--rank", type=int, default=0, metavar="N", help="with --trace: the rank whose step is traced (0)")
    add("--json", action="store_true", help="for programs; bytes and seconds")
    return parser


def _with_count(argv: list[str]) -> list[str]:
    """``argv`` with a number after a --suggest that has none, so that it does not take a file name as its value."""
    after = [*argv[1:], ""]
    return [
        f"{word}={SHOWN}" if word == "--suggest" and not n.isdigit() else word
        for word, n in zip(argv, after, strict=True)
    ]


def kind_of(name: str, memory: float | None = None, network: float | None = None) -> Kind:
    """The kind of that name, in any case, with the memory (GiB) and network (GB/s) of one's own; ConfigError."""
    kind = known(name)
    for flag, value in (("--memory", memory), ("--network", network)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag}={value:g} must be more than 0")
    return replace(kind, memory=memory or kind.memory, network=(network or kind.network / 1e9) * 1e9)


def facts(found: Forecast) -> dict[str, Any]:
    """A forecast as plain values, in bytes and seconds."""
    return {
        "parameters": count.parameters(found.model),
        "layout": asdict(found.layout),
        "memory": [{**asdict(part), "total": part.total} for part in found.memory],
        "available": found.kind.memory * GIB,
        "verdict": found.room,
        "bubble": time.bubble(found.layout),
        "sent": asdict(found.volume),
        "step": found.step and {**asdict(found.step), "total": found.step.total},
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "hfu": found.hfu,
    }


def report(run: RunConfig, found: Forecast, kind: str) -> Iterator[str]:
    """A forecast for a reader."""
    model, where = found.model, found.layout
    groups = f" in groups of {where.sharing} replicas" if where.copies > 1 else ""
    yield f"{count.parameters(model):,} parameters: {model.layers} blocks of width {model.hidden}, samples of {model.context} tokens"
    yield (
        f"{where.gpus} x {kind}: data {where.data} x pipeline {where.pipeline} x tensor {where.tensor}; engine "
        f"{run.engine.name}, ZeRO stage {zero_stage(run.engine, where.pipeline)}{groups}, recompute {where.recompute}"
    )
    yield (
        f"{found.samples} samples a step: {where.accumulation} micro-batch{'es' * (where.accumulation > 1)} of "
        f"{where.micro_size} on each replica"
    )
    if model.head_width % 8:
        yield (
            f"a head is {model.head_width} wide; tensor cores need a multiple of 8; other widths were measured to be a third "
            f"slower than estimated below"
        )
    yield ""
    yield from _memory(found)
    yield ""
    yield from _speed(found)


def _memory(found: Forecast) -> Iterator[str]:
    """The table of memory by part: the first, the fullest and the last stage."""
    last = len(found.memory) - 1
    shown = sorted({0, found.worst, last})
    names = [f"stage {i + 1}" if last else "GiB" for i in shown]
    yield f"{'memory of a GPU, GiB' if last else 'memory of a GPU':<22}" + "".join(f"{name:>10}" for name in names)
    for part in fields(Memory):
        yield f"  {part.name:<20}" + "".join(f"{getattr(found.memory[i], part.name) / GIB:>10.2f}" for i in shown)
    need = f"  {'total':<20}" + "".join(f"{found.memory[i].total / GIB:>10.2f}" for i in shown)
    at = f", at stage {found.worst + 1} of {last + 1}" if last else ""
    yield f"{need}   of {found.kind.memory:g}{at}: {found.room}"


def _speed(found: Forecast) -> Iterator[str]:
    """Seconds and bytes of a step, and tokens per second."""
    where, sent, step = found.layout, asdict(found.volume), found.step
    if step is None:
        yield "speed is not predicted in fp32; set engine.precision to bf16 or fp16"
        return
    yield f"{'a step':<22}{'ms':>10}{'GiB sent':>12}"
    for name, seconds in asdict(step).items():
        if seconds or sent.get(name):
            volume = f"{sent[name] / GIB:>12.2f}" if sent.get(name) else ""
            yield f"  {name:<20}{seconds * 1000:>10.1f}{volume}"
    yield f"  {'total':<20}{step.total * 1000:>10.1f}"
    yield ""
    if where.pipeline > 1:
        yield f"bubble of equal stages {time.bubble(where):.1%}"
    rate = found.tokens_per_second or 0.0
    again = f", HFU {found.hfu:.1%}" if found.hfu != found.mfu else ""
    yield f"{rate:,.0f} tokens/s, {rate / where.gpus:,.0f} of each GPU: MFU {found.mfu:.1%}{again}"


def ranking(run: RunConfig, shown: list[suggest.Suggestion], fitting: int, kind: str) -> Iterator[str]:
    """Suggestions for a reader."""
    gpus = run.job.nodes * run.job.gpus
    if not shown:
        yield f"nothing fits {gpus} x {kind}; more GPUs, or a smaller model.context"
        return
    yield f"{fitting} layouts fit {gpus} x {kind}; the fastest, each with its best micro-batch:"
    yield f"{'tokens/s':>12}{'MFU':>8}{'GiB':>7}  settings"
    for one in shown:
        found = one.forecast
        need = found.memory[found.worst].total / GIB
        told = " ".join(one.words) or "(as given)"
        yield f"{found.tokens_per_second or 0:>12,.0f}{found.mfu or 0:>8.1%}{need:>7.1f}  {told}"


def _doubling(best: Sequence[suggest.Suggestion], kind: Kind) -> Iterator[str]:
    """What twice as many nodes would give with the first suggestion."""
    for one in best:
        nodes, more, rate = 2 * one.run.job.nodes, suggest.doubled(one, kind), one.forecast.tokens_per_second or 0.0
        if more is None:
            yield f"on {nodes} nodes: batch.global_size={one.run.batch.global_size} cannot be divided over so many GPUs"
            continue
        twice = more.tokens_per_second or 0.0
        yield (
            f"on {nodes} nodes the first would reach {twice:,.0f} tokens/s with batch.micro_size={more.layout.micro_size}: "
            f"{twice / rate / 2:.1%} of twice as much"
        )
