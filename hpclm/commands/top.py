"""``hpclm top``: show all runs below a folder live, with their loss curves."""

import shutil
import sys
from contextlib import suppress
from pathlib import Path

from hpclm.base import paths
from hpclm.base.terminal import quit_key, say
from hpclm.launch.jobs import States
from hpclm.parser import Parser, number
from hpclm.reporting.run_table import TopScreen
from hpclm.rundir import runs as folders

PATIENCE = 0.75  # time limit in seconds for each of a scheduler's answers
CLEAR = "\x1b[H\x1b[2J"


def main(folder: Path | None, runs_folder: Path, every: float, once: bool) -> int:
    """Show the runs until q is pressed, or once."""
    watch = TopScreen(folder or runs_folder, States(PATIENCE).of)
    folders.check_folder(watch.folder)
    if once or not sys.stdout.isatty():
        statuses = watch.look()
        if statuses:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            say("\n".join(watch.lines(statuses, width)))
        else:
            say(f"no run in {watch.folder}; name their folder, or start one with hpclm submit")
        return 0
    with suppress(KeyboardInterrupt), quit_key() as pressed:
        while True:
            sys.stdout.write(CLEAR + "\n".join(watch.screen(*shutil.get_terminal_size())))
            sys.stdout.flush()
            if pressed(every):
                break
    say()
    return 0


def parser() -> Parser:
    """The parser of ``hpclm top``."""
    options = Parser(
        prog="hpclm top",
        description="Show all runs below a folder, live, until q or Ctrl-C. If the output is not a terminal, print one table.",
    )
    options.add_argument(
        "folder", nargs="?", type=paths.option_path, metavar="FOLDER", help="the same as --runs FOLDER"
    )
    options.add_runs_folder()
    every = number(lambda value: 0.1 <= value <= 86400, "between 0.1 and 86400 seconds")
    options.add_argument(
        "--every", type=every, default=2.0, metavar="SECONDS", help="time between updates (default: 2)"
    )
    options.add_argument("--once", action="store_true", help="print one table, as plain lines")
    return options
