"""``hpclm save-now``: have runs save a checkpoint, and continue."""

from hpclm.launch.jobs import jobs_of
from hpclm.parser import SEVERAL, Parser
from hpclm.rundir import control_files, runs


def main(argv: list[str]) -> int:
    """``hpclm save-now``."""
    args = parser().parse_args(argv)
    chosen = runs.choose(args.run, args.runs)
    return control_files.request_all("save-now", chosen, args.wait, "saving; see: hpclm checkpoints", jobs_of)


def parser() -> Parser:
    """The parser of ``hpclm save-now``."""
    options = Parser(
        prog="hpclm save-now",
        description="Have runs save after the current step, and continue.",
        epilog=control_files.EPILOG,
    )
    options.add_run(SEVERAL, nargs="+")
    options.add_wait("how long to wait for it")
    options.add_runs_folder()
    return options
