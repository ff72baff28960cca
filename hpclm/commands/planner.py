"""``hpclm planner``: expected memory and speed of a run, and layouts that fit."""

import json
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

from hpclm.base.errors import ConfigError, ExitCode
from hpclm.base.terminal import say
from hpclm.config.settings import is_override
from hpclm.node.gpus import KINDS
from hpclm.parser import Parser, exit_codes, number, setting
from hpclm.planning import forecast, suggest, tables
from hpclm.preprocess import command_line

CODES = {ExitCode.FAILED: "no layout fits", ExitCode.INVALID: "wrong settings"}
EPILOG = f"kinds of GPUs: {', '.join(KINDS)}\n{exit_codes(CODES)}"


def main(
    settings: list[str],
    job: list[str],
    gpus_kind: str,
    memory: float | None,
    network: float | None,
    suggest_layouts: bool,
    as_json: bool,
    typed: list[str],
) -> int:
    """Print the forecast of a run, a comparison of several, or the best layouts."""
    kind = tables.kind_of(gpus_kind, memory, network)
    settings = [*settings, *job]
    files = [setting for setting in settings if not is_override(setting)]
    if len(files) > 1 and suggest_layouts:
        raise ConfigError(f"give one settings file with --suggest, not {len(files)}: {', '.join(files)}")
    if len(files) > 1:
        plans = {path: tables.on_its_gpus([path, *filter(is_override, settings)], kind) for path in files}
        rows = {path: {"error": str(p)} if isinstance(p, ConfigError) else tables.facts(p) for path, p in plans.items()}
        _show(rows if as_json else None, tables.comparison(plans, gpus_kind))
        return 0
    whole, _ = command_line.planned(settings, typed)
    phase, run = tables.longest_phase(whole)
    if not suggest_layouts:
        run = tables.with_micro_size(run, kind)
        expected = forecast.predict(run, kind)
        lines = tables.report(run, expected, gpus_kind)
        if whole.data.phases:
            lines = chain([f"phase {phase} of data.phases, which has the longest samples:"], lines)
        _show(tables.facts(expected) if as_json else None, lines)
        return 0
    best = suggest.ranked(run, kind)
    shown = [{"settings": one.options, **tables.facts(one.forecast)} for one in best[: tables.SHOWN]]
    _show(shown if as_json else None, tables.ranking(run, best, gpus_kind))
    return ExitCode.DONE if best else ExitCode.FAILED


def parser() -> Parser:
    """The parser of ``hpclm planner``."""
    options = Parser(
        prog="hpclm planner",
        description="Estimate the memory that a run needs on each GPU, and its speed. Nothing is started.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = options.add_argument
    above_0 = number(lambda value: 0 < value < math.inf, "a number above 0")
    options.add_settings("one settings file, or several to compare, and overrides", files=True)
    options.add_gpus_kind("kind of GPU (H100)")
    add("--nodes", "-N", **setting("job.nodes"), metavar="N", help="nodes, short for job.nodes")
    add("--gpus", **setting("job.gpus"), metavar="N", help="GPUs of each node, short for job.gpus")
    add("--memory", type=above_0, metavar="GIB", help="memory of a GPU, if it differs from the default of its kind")
    add(
        "--network", type=above_0, metavar="GB/S", help="gigabytes/s between each GPU and other nodes, in one direction"
    )
    best = "the ten fastest layouts that fit, and their settings"
    add("--suggest", dest="suggest_layouts", action="store_true", help=best)
    options.add_json("for programs; bytes and seconds")
    return options


def _show(values: Any, lines: Iterator[str]) -> None:
    """Print ``values`` as JSON, or ``lines`` if there are no values."""
    say("\n".join(lines) if values is None else json.dumps(values, indent=1))
