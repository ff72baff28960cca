"""``hpclm doctor``: facts about this process, its problems and their remedies."""

import json
import logging

from hpclm.base.errors import ConfigError
from hpclm.base.terminal import say
from hpclm.diagnostics import facts, verdict
from hpclm.distributed import bootstrap
from hpclm.launch.schedulers import current_job
from hpclm.parser import Parser


def main(as_json: bool, ranks: bool) -> int:
    """Print the facts about this process, with problems and hints; returns 1 if there are problems."""
    logging.basicConfig(level=logging.ERROR)
    problems: list[str] = []
    try:
        world = bootstrap.detect(alone=False)
    except ConfigError as error:
        world = bootstrap.World("single", 0, 1)
        problems += error.problems
    local_facts = facts.everything(world, current_job().node)
    problems += verdict.problems(local_facts)
    facts_of_node = [local_facts] * world.local_size
    hints = [*verdict.hints(local_facts), *(finding.text for finding in verdict.memory(facts_of_node))]
    if as_json:
        say(json.dumps({"ok": not problems, "problems": problems, "hints": hints, "found": local_facts}))
        return bool(problems)
    lines = [facts.line(local_facts)] if ranks or world.rank else facts.lines(local_facts)
    lines += [f"problem: {text}" for text in problems]
    lines += [f"hint: {text}" for text in hints]
    if not (problems or hints or world.rank):
        lines.append("no problems found")
    say("\n".join(lines))
    return bool(problems)


def parser() -> Parser:
    """The parser of ``hpclm doctor``."""
    options = Parser(
        prog="hpclm doctor",
        description="Show this process's versions, devices, network, limits and launcher, and the problems. "
        "Under srun, mpirun or torchrun, the first process shows everything, and each other process prints one line.",
        epilog="exit codes: 0 nothing would stop a run · 1 a problem would stop a run",
    )
    options.add_json("print everything as JSON, one object per process")
    options.add_argument("--ranks", action="store_true", help="print only one line per process")
    return options
