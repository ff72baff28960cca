"""``hpclm request``: have runs save a checkpoint and continue, or save and stop."""

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
"""Request -> the file that asks a run, and the message once the run has complied, which ends in its name."""
PATIENCE = 5.0  # seconds that a scheduler may take to answer
CODES = {ExitCode.FAILED: "a run does not comply", ExitCode.INVALID: "a run is not training"}


def main(run: list[str], request: str, wait: float, runs_folder: Path) -> int:
    """Ask the runs, and wait until they have complied."""
    if request not in REQUESTS:
        if run[0] in REQUESTS:
            raise UsageError(f"the run comes first: hpclm request RUN {run[0]}")
        raise UsageError(
            f"{request!r} is not something to ask for; choose one of {', '.join(REQUESTS)}.{hint(request, [*REQUESTS])}"
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
    options.add_argument("request", metavar="save|stop", help="what they should do")
    options.add_wait("how long to wait for it")
    return options
