"""``hpclm cancel``: make runs save and exit, and keep Slurm from starting them again."""

from pathlib import Path

from hpclm.launch import cancel
from hpclm.parser import SEVERAL, STOP_OR_CANCEL, Parser
from hpclm.rundir import runs


def main(run: list[str], runs_folder: Path, now: bool, wait: float) -> int:
    """End the runs, and wait for their jobs and processes to exit."""
    return cancel.cancel(runs.choose(run, runs_folder), now, wait)


def parser() -> Parser:
    """The parser of ``hpclm cancel``."""
    options = Parser(
        prog="hpclm cancel",
        description="End runs: each finishes its current step, saves and exits, and Slurm does not start it again. 'hpclm "
        "resume' continues it.",
        epilog=STOP_OR_CANCEL,
    )
    options.add_run(SEVERAL, nargs="+")
    options.add_wait("how long to wait for them to exit")
    options.add_argument("--now", action="store_true", help="end them without saving")
    return options
