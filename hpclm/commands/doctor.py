"""``hpclm doctor``: what this process has, what is wrong with it, and what to do."""

import json
import logging

from hpclm.diagnostics import facts, verdict
from hpclm.distributed import bootstrap
from hpclm.errors import ConfigError
from hpclm.launch.schedulers import current_job
from hpclm.parser import Parser
from hpclm.terminal import say


def main(argv: list[str]) -> int:
    """``hpclm doctor``."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR)

    try:
        world, contradictions = bootstrap.detect(alone=False), []
    except ConfigError as error:
        world, contradictions = bootstrap.World("single", 0, 1), error.problems
    local_facts = facts.everything(world, current_job().node)
    problems = [*contradictions, *verdict.problems(local_facts)]
    hints = [
        *verdict.hints(local_facts),
        *(finding.text for finding in verdict.memory([local_facts] * world.local_size)),
    ]
    if args.json:
        say(json.dumps({"ok": not problems, "problems": problems, "hints": hints, "found": local_facts}))
        return bool(problems)
    lines = [facts.line(local_facts)] if args.ranks or world.rank else facts.lines(local_facts)
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
