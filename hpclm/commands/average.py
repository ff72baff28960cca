"""``hpclm average``: the mean of a run's checkpoints as a new run."""

from pathlib import Path

from hpclm.base import paths
from hpclm.base.errors import UsageError
from hpclm.base.terminal import say
from hpclm.parser import Parser, completed, whole
from hpclm.rundir import runs


def main(run: Path, target: Path, runs_folder: Path, last: int | None, steps: list[int]) -> int:
    """Average checkpoints, and print the result."""
    if (last is None) == (not steps):
        raise UsageError("give either --last K or --steps STEP STEP ..., and at least two different steps")
    from hpclm.interop.average import averaged

    say(averaged(runs.located(run, runs_folder), target, last, steps))
    return 0


def parser() -> Parser:
    """The parser of ``hpclm average``."""
    options = Parser(
        prog="hpclm average",
        description="Write the mean of the weights of several checkpoints as the new run TARGET, at step 0 and without optimizer state. "
        "generate, evaluate, convert and checkpoint.init_from use it like any other run.",
    )
    add = options.add_argument
    completed(add("run", type=paths.option_path, metavar="RUN"), "runs")
    add("target", type=paths.option_path, metavar="TARGET", help="the directory of the new run; it must not exist")
    options.add_runs_folder()
    add("--last", type=whole(2), metavar="K", help="the newest K checkpoints")
    add("--steps", type=whole(0), nargs="+", default=[], metavar="STEP", help="the checkpoints of these steps")
    return options
