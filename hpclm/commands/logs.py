"""``hpclm logs``: print or follow the log of a run, of any rank, or of its job."""

import re
import sys

from hpclm import terminal
from hpclm.launch import jobs
from hpclm.parser import Parser
from hpclm.rundir import runs as folders
from hpclm.rundir.logs import find_log, follow, last, matching, over, whole

FOLLOWED = 20  # lines that following begins with
PATIENCE = 5.0  # seconds squeue may take


def main(argv: list[str]) -> int:
    """``hpclm logs``."""
    options = parser()
    args = options.parse_args(argv)
    if min(args.lines or 0, args.rank or 0) < 0:
        options.error("--lines and --rank must be at least 0")
    try:
        re.compile(args.grep or "")
    except re.error as error:
        options.error(f"--grep {args.grep!r} is not a regular expression: {error}")
    state, out = jobs.States(PATIENCE), folders.resolve(args.run, args.runs)
    path = find_log(out, args.rank, args.job, state, args.follow)
    if args.follow:
        lines = follow(path, FOLLOWED if args.lines is None else args.lines, args.grep, over(out, state))
    else:
        lines = matching(whole(path), args.grep) if args.lines is None else iter(last(path, args.lines, args.grep))
    for line in terminal.lines(lines):
        sys.stdout.buffer.write(line)
        if args.follow:
            sys.stdout.buffer.flush()
    return 0


def parser() -> Parser:
    """The parser of ``hpclm logs``."""
    options = Parser(
        prog="hpclm logs",
        description="Print the log of a run: rank 0's over all attempts, or the job's if training has not started.",
        epilog="With -f, it follows the run across restarts, until the run is over or you press Ctrl-C.",
    )
    options.add_run()
    options.add_runs_folder()
    options.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    which = options.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="output of rank N (default: 0)")
    which.add_argument("--job", action="store_true", help="output of the job script and its processes")
    options.add_argument("--grep", metavar="REGEX", help="only lines that match")
    options.add_argument(
        "--lines", type=int, metavar="N", help=f"only the last N lines (default: all; with -f, {FOLLOWED})"
    )
    return options
