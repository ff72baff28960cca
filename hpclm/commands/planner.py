"""``hpclm planner``: expected memory and speed of a run, and layouts that fit."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from hpclm.config.compose import is_override
from hpclm.datasets import command_line
from hpclm.errors import ConfigError, ExitCode
from hpclm.node.gpus import KINDS
from hpclm.parser import Parser, exit_codes
from hpclm.planning import forecast, suggest, tables
from hpclm.terminal import say

CODES = {ExitCode.FAILED: "no layout fits", ExitCode.INVALID: "wrong settings"}
EPILOG = f"kinds of GPUs: {', '.join(KINDS)}\n{exit_codes(CODES)}"


def main(argv: list[str]) -> int:
    """``hpclm planner``."""
    options = parser()
    args = options.parse_intermixed_args(argv)
    settings = [*args.settings]
    settings += [f"job.{name}={value}" for name in ("nodes", "gpus") if (value := getattr(args, name)) is not None]
    with options.mistakes():
        kind = tables.kind_of(args.gpus_kind, args.memory, args.network)
    files = [setting for setting in settings if not is_override(setting)]
    if len(files) > 1 and args.suggest:
        raise ConfigError(f"give one settings file with --suggest, not {len(files)}: {', '.join(files)}")
    if len(files) > 1:
        plans = {path: tables.on_its_gpus([path, *filter(is_override, settings)], kind) for path in files}
        rows = {path: {"error": str(p)} if isinstance(p, ConfigError) else tables.facts(p) for path, p in plans.items()}
        _show(rows if args.json else None, tables.comparison(plans, args.gpus_kind))
        return 0
    run, _ = command_line.planned(settings, argv)
    if not args.suggest:
        run = tables.with_micro_size(run, kind)
        plan = forecast.of(run, kind)
        _show(tables.facts(plan) if args.json else None, tables.report(run, plan, args.gpus_kind))
        return 0
    best = suggest.ranked(run, kind)
    shown = [{"settings": one.options, **tables.facts(one.forecast)} for one in best[: tables.SHOWN]]
    _show(shown if args.json else None, tables.ranking(run, best, args.gpus_kind))
    return ExitCode.DONE if best else ExitCode.FAILED


def parser() -> Parser:
    """The parser of ``hpclm planner``."""
    options = Parser(
        prog="hpclm planner",
        description="Estimate the memory that a run needs on each GPU, and its speed. Nothing is started.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = options.add_argument
    files_or_one = "one settings file, or several to compare, and overrides"
    options.add_settings(files_or_one, "presets", metavar="FILE | key=value")
    add("--gpus-kind", default="H100", metavar="KIND", help="kind of GPU (H100)")
    add("--nodes", "-N", metavar="N", help="nodes, short for job.nodes")
    add("--gpus", metavar="N", help="GPUs of each node, short for job.gpus")
    add("--memory", type=float, metavar="GIB", help="memory of a GPU, if it differs from the default of its kind")
    add("--network", type=float, metavar="GB/S", help="gigabytes/s to other nodes for each GPU, in one direction")
    add("--suggest", action="store_true", help="the ten fastest layouts that fit, and their settings")
    add("--json", action="store_true", help="for programs; bytes and seconds")
    return options


def _show(values: Any, lines: Iterator[str]) -> None:
    """Print ``values`` as JSON; None: the lines."""
    say("\n".join(lines) if values is None else json.dumps(values, indent=1))
