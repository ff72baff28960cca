"""``hpclm logs``: print or follow the log of a run, of any rank, or of its job."""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpclm import cli, files, terminal
from hpclm.errors import ConfigError
from hpclm.node import slurm
from hpclm.node.processes import NoAnswerError
from hpclm.rundir import runs as folders
from hpclm.rundir.logs import follow, last, matching, whole
from hpclm.rundir.runs import Run
from hpclm.rundir.status import RunStatus, query

FOLLOWED = 20  # lines that following begins with
PATIENCE = 5.0  # seconds squeue may take


def main(argv: list[str]) -> int:
    """``hpclm logs``."""
    parser = cli.run_parser(
        "logs",
        "Print the log of a run: rank 0's over all attempts, or the job's if training has not started.",
        epilog="With -f, it follows the run across restarts, until the run is over or you press Ctrl-C.",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="output of rank N (default: 0)")
    which.add_argument("--job", action="store_true", help="output of the job script and its processes")
    parser.add_argument("--grep", metavar="REGEX", help="only lines that match")
    parser.add_argument(
        "--lines", type=int, metavar="N", help=f"only the last N lines (default: all; with -f, {FOLLOWED})"
    )
    args = parser.parse_args(argv)
    if args.lines is not None and args.lines < 0:
        parser.error("--lines must be at least 0")
    if args.rank is not None and args.rank < 0:
        parser.error("--rank must be at least 0")
    try:
        re.compile(args.grep or "")
    except re.error as error:
        parser.error(f"--grep {args.grep!r} is not a regular expression: {error}")
    run = folders.read(folders.resolve(args.run, args.runs))
    path = wanted(run, args.rank, args.job) or await_log(run, args.rank, args.job, args.follow)
    if args.follow:
        count = FOLLOWED if args.lines is None else args.lines
        for line in terminal.lines(follow(path, count, args.grep, over(run.out, say=True))):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    else:
        lines = matching(whole(path), args.grep) if args.lines is None else last(path, args.lines, args.grep)
        sys.stdout.buffer.writelines(terminal.lines(lines))
    return 0


def wanted(run: Run, rank: int | None, job: bool) -> Path | None:
    """The requested log, if it exists; the job's if training has not started and no rank was given."""
    if rank:
        path = run.out / "logs" / f"rank-{rank:05d}.log"
        return path if files.is_file(path) else None
    if not job and files.is_file(run.out / "log.txt"):
        return run.out / "log.txt"
    found = None if rank is not None else run.job_log() or slurm_output(run)
    if found and not job:
        note(f"training has not started; this is the job's log, {found}:")
    return found


def slurm_output(run: Run) -> Path | None:
    """The output file of the newest job according to Slurm, for a job that jobs.jsonl does not list."""
    for job in reversed(run.jobs):
        try:
            path = slurm.job_log(job, PATIENCE)
        except NoAnswerError:
            return None
        if path and files.is_file(Path(path)):
            return Path(path)
    return None


def await_log(run: Run, rank: int | None, job: bool, follows: bool) -> Path:
    """The requested log as soon as it exists; ConfigError if it never will."""
    ended = over(run.out, say=False)
    while follows and not ended():
        status = query([run], PATIENCE)[0]
        note(f"waiting for the log; {status.name}{f': {status.where()}' if status.where() else ''}")
        for _ in range(30):
            time.sleep(0.5)
            run = folders.read(run.out)
            path = wanted(run, rank, job)
            if path:
                return path
    path = wanted(run, rank, job)
    if path:
        return path
    status = query([run], PATIENCE)[0]
    what = f"logs/rank-{rank:05d}.log" if rank else "log of a job" if job else "log yet"
    named = (re.fullmatch(r"rank-([0-9]{1,9})\.log", found.name) for found in (run.out / "logs").glob("rank-*.log"))
    kept = sorted(int(found[1]) for found in named if found)
    ranks = f"; ranks with a log: 0 to {kept[-1]}" if rank and kept else ""
    where = "; ".join(each.log for each in run.submissions[-1:])
    later = f"; the job will print to {where}" if where and status.live else ""
    raise ConfigError(
        f"{files.shown(run.out)} has no {what}{ranks}; it is {status.name} {status.where()}{later}".rstrip()
    )


def over(out: Path, say: bool) -> Callable[[], bool]:
    """A function that returns whether the run is over, as far as can be seen from here, and with ``say`` prints how it ended."""

    def is_over() -> bool:
        status = query([folders.read(out)], PATIENCE)[0]
        if status.live or status.name == "unknown" or status.asked:
            return False
        if say:
            tell(status)
        return True

    return is_over


def tell(status: RunStatus) -> None:
    """Print how a run ended."""
    note(f"{files.shown(status.run.out)} is over: {status.how()}")


def note(text: str) -> None:
    """Print something that is not part of the log."""
    sys.stdout.flush()
    terminal.say(f"hpclm logs: {text}", file=sys.stderr)
