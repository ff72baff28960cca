"""``hpclm doctor``: what this process has, what is wrong with it, and what to do."""

import json
import logging
from typing import Any

from hpclm.diagnostics import facts, verdict
from hpclm.diagnostics.facts import Facts
from hpclm.distributed import bootstrap
from hpclm.errors import ConfigError
from hpclm.parser import Parser
from hpclm.terminal import many, say


def main(argv: list[str]) -> int:
    """``hpclm doctor``."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR)

    try:
        world, contradictions = bootstrap.detect(alone=False), []
    except ConfigError as error:
        world, contradictions = bootstrap.World("single", 0, 1), error.problems
    own = facts.everything(world)
    problems = [*contradictions, *verdict.problems(own)]
    hints = [*verdict.hints(own), *(finding.text for finding in verdict.memory([own] * world.local_size))]
    if args.json:
        say(json.dumps({"ok": not problems, "problems": problems, "hints": hints, "found": own}))
        return bool(problems)
    lines = [line(own)] if args.ranks or world.rank else listed(own)
    lines += [*(f"problem: {text}" for text in problems), *(f"hint: {text}" for text in hints)]
    say("\n".join(lines if problems or hints or world.rank else [*lines, "no problems found"]))
    return bool(problems)


def parser() -> Parser:
    """The parser of ``hpclm doctor``."""
    options = Parser(
        prog="hpclm doctor",
        description="Show this process's versions, devices, network, limits and launcher, and what is wrong. "
        "Under srun, mpirun or torchrun, the first process shows everything, and the others print a line each.",
        epilog="exit codes: 0 nothing would stop a run · 1 something would",
    )
    options.add_argument("--json", action="store_true", help="print everything as JSON, an object for each process")
    options.add_argument("--ranks", action="store_true", help="print only a line for each process")
    return options


def listed(own: Facts) -> list[str]:
    """All facts, a line for each."""
    lines = []
    for name, value in own.items():
        if isinstance(value, dict) and name in ("collect_env", "network", "variables"):
            lines += [name, *(f"  {inner:<24}{shown(part)}" for inner, part in value.items())]
        else:
            lines.append(f"{name:<26}{shown(value)}")
    return lines


def line(own: Facts) -> str:
    """One process in a line."""
    gpus, visible = own.get("gpus"), own["visible"]
    device = f"{gpus} x {own['device_name']}" if gpus else "CPU"
    device += f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    rank = f"rank {own['rank']}/{own['size']}  {own['host']}  local {own['local_rank']}/{own['local_size']}"
    return f"{rank}  {own['launcher']}  {device}  {many(own['threads'], 'thread')}  python {own['python']}  torch {own['torch']}"


def shown(value: Any) -> str:
    """A value for people: bytes in GiB, lists and objects in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(part)}" for name, part in value.items())
    if isinstance(value, list):
        return "; ".join(map(shown, value)) or "none"
    if isinstance(value, int) and value >= 1 << 24:
        return f"{value / (1 << 30):.1f} GiB"
    return "none" if value is None else str(value).replace("\n", "; ")
