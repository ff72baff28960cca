"""``hpclm logs``: print or follow the log of a run, of any rank, or of its job."""

import argparse
import re
import sys
from pathlib import Path

from hpclm.base import terminal
from hpclm.launch import jobs
from hpclm.parser import Parser, whole
from hpclm.rundir import logs
from hpclm.rundir import runs as folders

FOLLOWED = 20  # lines that -f prints first
PATIENCE = 5.0  # time limit in seconds for squeue


def main(
    run: str, runs_folder: Path, follow: bool, rank: int | None, job: bool, grep: str | None, lines: int | None
) -> int:
    """Print lines of a log; with ``follow``, also new lines."""
    state = jobs.States(PATIENCE)
    out = folders.resolve(run, runs_folder)
    path = logs.find_log(out, rank, job, state, follow)
    if follow:
        chosen = logs.follow(path, FOLLOWED if lines is None else lines, grep, logs.over(out, state))
    elif lines is None:
        chosen = logs.matching(logs.whole(path), grep)
    else:
        chosen = iter(logs.last(path, lines, grep))
    for line in terminal.lines(chosen):
        sys.stdout.buffer.write(line)
        if follow:
            sys.stdout.buffer.flush()
    return 0


def parser() -> Parser:
    """The parser of ``hpclm logs``."""
    options = Parser(
        prog="hpclm logs",
        description="Print the log of a run: rank 0's over all attempts, or the job's if training has not started.",
        epilog="With -f, it follows the run across restarts, until the run is over or you press Ctrl-C.",
    )
    add = options.add_argument
    options.add_run()
    add("-f", "--follow", action="store_true", help="keep printing new lines")
    which = options.add_mutually_exclusive_group()
    which.add_argument("--rank", type=whole(0), metavar="N", help="output of rank N (default: 0)")
    which.add_argument("--job", action="store_true", help="output of the job script and its processes")
    add("--grep", type=_pattern, metavar="REGEX", help="only lines that match")
    add("--lines", type=whole(0), metavar="N", help=f"only the last N lines (default: all; with -f, {FOLLOWED})")
    return options


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text
