"""The verb ``hpclm planner``: the memory and the speed to expect of a run, and layouts that fit."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from hpclm import cli
from hpclm.cluster.kinds import KINDS, Kind
from hpclm.config import RunConfig
from hpclm.errors import ConfigError
from hpclm.model import count
from hpclm.planning import forecast, suggest, time
from hpclm.planning.code import zero_stage
from hpclm.planning.forecast import GIB, Forecast
from hpclm.planning.memory import Memory
from hpclm.registry import hint

SHOWN = 10  # suggestions, where no number is given


def main(argv: list[str]) -> int:
    """``hpclm planner``."""
    args = _parser().parse_intermixed_args(_with_count(argv))
    words = [*args.settings]
    words += [f"job.{name}={value}" for name in ("nodes", "gpus") if (value := getattr(args, name)) is not None]
    run = cli.settings(words)
    kind = kind_of(args.gpus_kind, args.memory, args.network)
    if args.suggest is None:
        found = forecast.of(run, kind)
        print(json.dumps(facts(found), indent=1) if args.json else "\n".join(report(run, found, args.gpus_kind)))
        return 0
    if args.suggest < 1:
        raise ConfigError(f"--suggest={args.suggest} must be at least 1")
    best = suggest.ranked(run, kind)
    shown = best[: args.suggest]
    if args.json:
        print(json.dumps([{"settings": s.words, **facts(s.forecast)} for s in shown], indent=1))
    else:
        print("\n".join(ranking(run, shown, len(best), args.gpus_kind)))
    return 0 if best else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpclm planner",
        description="Say what a run will need of each GPU, and how fast it will be: arithmetic alone, nothing is started.",
        epilog=f"kinds of GPUs: {', '.join(KINDS)}\nexit codes: 0 done · 1 no layout fits · 2 wrong arguments · 64 wrong settings",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("settings", nargs="*", metavar="FILE | key=value", help="one settings file, and overrides")
    add("--gpus-kind", default="H100", metavar="KIND", help="what the GPUs are (H100)")
    add("--nodes", "-N", metavar="N", help="nodes, short for job.nodes")
    add("--gpus", metavar="N", help="GPUs of each node, short for job.gpus")
    add("--memory", type=float, metavar="GIB", help="memory of a GPU, where it is not the kind's usual one")
    add("--network", type=float, metavar="GB/S", help="gigabytes/s to other nodes, a GPU's share, one direction")
    add(
        "--suggest", type=int, metavar="N", help="the N fastest layouts that fit (10), and the settings to ask for them"
    )
    add("--json", action="store_true", help="for programs; bytes and seconds")
    return parser


def _with_count(argv: list[str]) -> list[str]:
    """``argv`` with a number after a --suggest that has none, so that it does not take a file for one."""
    after = [*argv[1:], ""]
    return [
        f"{word}={SHOWN}" if word == "--suggest" and not n.isdigit() else word
        for word, n in zip(argv, after, strict=True)
    ]


def kind_of(name: str, memory: float | None = None, network: float | None = None) -> Kind:
    """The kind of that name, in any case, with the memory (GiB) and network (GB/s) of one's own; ConfigError."""
    known = {key.lower(): kind for key, kind in KINDS.items()}
    kind = known.get(name.lower())
    if kind is None:
        raise ConfigError(f"unknown kind of GPU {name!r}; choose one of {', '.join(KINDS)}.{hint(name, list(KINDS))}")
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
    yield f"{count.parameters(model):,} parameters: {model.layers} blocks of width {model.hidden}, samples of {model.context} tokens"
    yield (
        f"{where.gpus} x {kind}: data {where.data} x pipeline {where.pipeline} x tensor {where.tensor}; engine "
        f"{run.engine.name}, ZeRO stage {zero_stage(run.engine, where.pipeline)}, recompute {where.recompute}"
    )
    yield (
        f"{found.samples} samples a step: {where.accumulation} micro-batch{'es' * (where.accumulation > 1)} of "
        f"{where.micro_size} on each replica"
    )
    if model.head_width % 8:
        yield (
            f"a head is {model.head_width} wide; tensor cores want a multiple of 8, and runs without were a third slower "
            f"than said below"
        )
    yield ""
    yield from _memory(found)
    yield ""
    yield from _speed(found)


def _memory(found: Forecast) -> Iterator[str]:
    """The table of parts, a column for each stage that matters."""
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
    """Seconds, bytes, and what follows."""
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


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
