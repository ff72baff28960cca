"""``hpclm stop``: have runs save and end."""

from hpclm.launch.jobs import jobs_of
from hpclm.parser import SEVERAL, Parser
from hpclm.rundir import control_files, runs


def main(argv: list[str]) -> int:
    """``hpclm stop``."""
    args = parser().parse_args(argv)
    chosen = runs.choose(args.run, args.runs)
    return control_files.request_all("stop", chosen, args.wait, "saved and ended; continue with: hpclm resume", jobs_of)


def parser() -> Parser:
    """The parser of ``hpclm stop``."""
    options = Parser(
        prog="hpclm stop",
        description="Have runs save after the current step, and exit with code 0, so that a scheduler does not start them again. Works "
        "from any machine that sees the run directory; 'hpclm cancel' also ends runs that wait or hang. 'hpclm resume' continues "
        "them.",
        epilog=control_files.EPILOG,
    )
    options.add_run(SEVERAL, nargs="+")
    options.add_wait("how long to wait for it")
    options.add_runs_folder()
    return options
