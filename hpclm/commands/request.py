"""``hpclm request``: have runs save a checkpoint and continue, or save and stop."""

import argparse

from hpclm.errors import ExitCode
from hpclm.launch.jobs import States
from hpclm.parser import SEVERAL, STOP_OR_CANCEL, Parser, exit_codes
from hpclm.rundir import control_files, runs

REQUESTS = {
    "save": ("save-now", "saving; see: hpclm checkpoints"),
    "stop": ("stop", "saved and ended; continue with: hpclm resume"),
}
"""What runs can be asked to do: the file that asks a run, and what is said of one that has complied, before its name."""
PATIENCE = 5.0  # seconds that a scheduler may take to answer
CODES = {ExitCode.FAILED: "a run does not comply", ExitCode.INVALID: "a run is not training"}


def main(argv: list[str]) -> int:
    """``hpclm request``."""
    options = parser()
    if len(argv) > 1 and argv[0] in REQUESTS and not any(word in REQUESTS for word in argv[1:]):
        options.error(f"the run comes first: hpclm request RUN {argv[0]}")
    args = options.parse_intermixed_args(argv)
    file, done = REQUESTS[args.request]
    return control_files.request_all(file, runs.choose(args.run, args.runs), args.wait, done, States(PATIENCE))


def parser() -> Parser:
    """The parser of ``hpclm request``."""
    options = Parser(
        prog="hpclm request",
        description="Ask runs that train to do something after the current step.\n\n"
        "  save  save a checkpoint, and continue\n"
        "  stop  save, and exit with code 0, so that a scheduler does not start them again; 'hpclm resume' continues them",
        epilog=f"{STOP_OR_CANCEL}\n{exit_codes(CODES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_run(SEVERAL, nargs="+")
    options.add_argument("request", choices=list(REQUESTS), metavar="save|stop", help="what they are to do")
    options.add_wait("how long to wait for it")
    options.add_runs_folder()
    return options
