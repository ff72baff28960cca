"""``hpclm status``: the state of runs, within a second and even if the scheduler does not answer."""

import json
import os
import shutil
import sys
import time

from hpclm.launch.jobs import States
from hpclm.node import processes
from hpclm.parser import SEVERAL, Parser
from hpclm.reporting.run_table import detail, table, values
from hpclm.rundir import runs as folders
from hpclm.terminal import say

DEADLINE = 0.75  # seconds after the start of this process by which squeue must have answered
MIN_SECONDS = 0.3  # seconds that it has in any case


def main(argv: list[str]) -> int:
    """``hpclm status``."""
    args = parser().parse_args(argv)
    if not args.run:
        folders.check_folder(args.runs)
    runs = [folders.read(out) for out in folders.choose(args.run, args.runs) or folders.find(args.runs)]
    began = processes.started(os.getpid())
    statuses = States(max(MIN_SECONDS, DEADLINE - (time.time() - began if began else 0))).of(runs)
    if args.json:
        print(json.dumps([values(status) for status in statuses], indent=2))
    elif args.run:
        print("\n\n".join("\n".join(detail(status)) for status in statuses))
    elif statuses:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(table(statuses, width)))
    else:
        say(f"no run in {args.runs}; give another folder with --runs, or start a run with hpclm submit")
    return 0


def parser() -> Parser:
    """The parser of ``hpclm status``."""
    options = Parser(
        prog="hpclm status",
        description="Show the state of runs: all below a folder, or some in detail. Reads the runs' own files, and asks Slurm's "
        "squeue, which may be slow or missing.",
    )
    several = f"{SEVERAL} (default: all)"
    options.add_run(several, nargs="*")
    options.add_runs_folder()
    options.add_argument("--json", action="store_true", help="print a JSON list with an object for each run")
    return options
