"""``hpclm branch``: a new run from a checkpoint of another one."""

from pathlib import Path

from hpclm.base import files, paths
from hpclm.base.terminal import say
from hpclm.parser import Parser, completed, whole
from hpclm.rundir import runs


def main(run: Path, target: Path, settings: list[str], runs_folder: Path, at: int | None) -> int:
    """Make the branch, and print the command that trains it."""
    from hpclm.launch.branch import branched

    step = branched(runs.located(run, runs_folder), target, at, settings)
    say(
        f"{target} goes on from step {step} of {run}; next: hpclm train {files.typed(target)}, or hpclm resume {files.typed(target)}"
    )
    return 0


def parser() -> Parser:
    """The parser of ``hpclm branch``."""
    options = Parser(
        prog="hpclm branch",
        description="Make TARGET, a run that goes on from a checkpoint of RUN with its optimizer and its position in the data, but with "
        "other settings: a cool-down, a longer schedule, another batch size or engine. RUN is not changed. The network, the data and "
        "the seed stay.",
    )
    add = options.add_argument
    completed(add("run", type=paths.option_path, metavar="RUN"), "runs")
    add("target", type=paths.option_path, metavar="TARGET", help="the directory of the new run; it must not exist")
    options.add_settings("settings that differ from the run's own", default=[])
    options.add_runs_folder()
    add("--at", type=whole(0), metavar="STEP", help="the step of the checkpoint (default: the newest)")
    return options
