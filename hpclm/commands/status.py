"""``hpclm status``: show the state of runs within a second, even if the scheduler does not answer."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from hpclm.base.terminal import say
from hpclm.launch.jobs import States
from hpclm.node import processes
from hpclm.parser import SEVERAL, Parser
from hpclm.reporting.run_table import detail, table, values
from hpclm.rundir import runs as folders

DEADLINE = 0.75  # seconds from the start of this process to the time limit of squeue
MIN_SECONDS = 0.3  # lowest time limit of squeue


def main(run: list[str], runs_folder: Path, as_json: bool) -> int:
    """Print some runs in detail, or a table of all."""
    if not run:
        folders.check_folder(runs_folder)
    runs = [folders.read_run(out) for out in folders.choose(run, runs_folder) or folders.find(runs_folder)]
    began = processes.started(os.getpid())
    elapsed = time.time() - began if began else 0.0
    statuses = States(max(MIN_SECONDS, DEADLINE - elapsed)).of(runs)
    if as_json:
        print(json.dumps([values(status) for status in statuses], indent=2))
    elif run:
        print("\n\n".join("\n".join(detail(status)) for status in statuses))
    elif statuses:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(table(statuses, width)))
    else:
        say(f"no run in {runs_folder}; give another folder with --runs, or start a run with hpclm submit")
    return 0


def parser() -> Parser:
    """The parser of ``hpclm status``."""
    options = Parser(
        prog="hpclm status",
        description="Show the state of runs: all below a folder, or some in detail. Reads the runs' own files, and asks Slurm's "
        "squeue, which may be slow or missing.",
    )
    options.add_run(f"{SEVERAL} (default: all)", nargs="*")
    options.add_json("print a JSON list with an object for each run")
    return options
