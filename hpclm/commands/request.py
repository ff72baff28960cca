"""``hpclm request``: ask runs to save a checkpoint and continue, or to save and stop."""

from pathlib import Path

from hpclm.base.errors import ExitCode, UsageError
from hpclm.base.registry import hint
from hpclm.launch.jobs import States
from hpclm.parser import SEVERAL, STOP_OR_CANCEL, Parser, exit_codes
from hpclm.rundir import control_files, runs

REQUESTS = {
    "save": ("save-now", "saving; see: hpclm checkpoints"),
    "stop": ("stop", "saved and ended; continue with: hpclm resume"),
}
"""Request -> the name of the control file, and the message that precedes the name of a run that has complied."""
PATIENCE = 5.0  # time limit in seconds for a scheduler's answer
CODES = {ExitCode.FAILED: "a run does not comply", ExitCode.INVALID: "a run is not training"}


def main(run: list[str], request: str, wait: float, runs_folder: Path) -> int:
    """Send the request to the runs, and wait until they have complied."""
    if request not in REQUESTS:
        if run[0] in REQUESTS:
            raise UsageError(f"the run comes first: hpclm request RUN {run[0]}")
        raise UsageError(
            f"unknown request {request!r}; choose one of {', '.join(REQUESTS)}.{hint(request, [*REQUESTS])}"
        )
    file, done = REQUESTS[request]
    return control_files.request_all(file, runs.choose(run, runs_folder), wait, done, States(PATIENCE))


def parser() -> Parser:
    """The parser of ``hpclm request``."""
    options = Parser(
        prog="hpclm request",
        description="Ask runs that train to do something after the current step.\n\n"
        "  save  save a checkpoint, and continue\n"
        "  stop  save, and exit with code 0, so that a scheduler does not start them again; 'hpclm resume' continues them",
        epilog=f"{STOP_OR_CANCEL}\n{exit_codes(CODES)}",
    )
    options.add_run(SEVERAL, nargs="+")
    options.add_argument("request", metavar="save|stop", help="what the runs should do")
    options.add_wait("how long to wait until they have done it")
    return options
