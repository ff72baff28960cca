"""``hpclm cancel``: have runs save and exit, and keep Slurm from starting them again."""

from hpclm.launch import cancel
from hpclm.parser import SEVERAL, STOP_OR_CANCEL, Parser
from hpclm.rundir import runs


def main(argv: list[str]) -> int:
    """``hpclm cancel``."""
    args = parser().parse_args(argv)
    return cancel.cancel(runs.choose(args.run, args.runs), args.now, args.wait)


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
    options.add_runs_folder()
    options.add_argument("--now", action="store_true", help="end them without saving")
    return options
