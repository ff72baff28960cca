"""``hpclm logs``: print or follow the log of a run, of any rank, or of its job."""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpclm import files, terminal
from hpclm.errors import ConfigError
from hpclm.parser import Parser
from hpclm.rundir import runs as folders
from hpclm.rundir.logs import follow, last, matching, whole
from hpclm.rundir.runs import Run
from hpclm.rundir.status import Queue, RunStatus, status_of

FOLLOWED = 20  # lines that following begins with
PATIENCE = 5.0  # seconds squeue may take
LOOK = 0.5  # seconds between looks for a log that does not exist yet


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
    queue, out = Queue(PATIENCE), folders.resolve(args.run, args.runs)
    path = find(out, args.rank, args.job, queue, args.follow)
    if args.follow:
        lines = follow(path, FOLLOWED if args.lines is None else args.lines, args.grep, over(out, queue))
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


def find(out: Path, rank: int | None, job: bool, queue: Queue, wait: bool) -> Path:
    """The requested log; if ``wait``, as soon as it exists. ConfigError if it never will."""
    noted, run = "", folders.read(out)
    while not (path := existing(run, rank, job)):
        [status] = queue.statuses([run])
        if not (wait and goes_on(status)):
            raise missing(status, rank, job)
        text = f"waiting for the log; {status.name}: {status.where()}".removesuffix(": ")
        if text != noted:
            note(text)
        noted = text
        time.sleep(LOOK)
        run = folders.read(out)
    return path


def existing(run: Run, rank: int | None, job: bool) -> Path | None:
    """The requested log, if it exists; the job's if training has not started and no rank was given."""
    path = run.out / (f"logs/rank-{rank:05d}.log" if rank else "log.txt")
    if not job and files.is_file(path):
        return path
    of_job = run.job_log() if rank is None else None
    if of_job and not job:
        note(f"training has not started; this is the job's log, {of_job}:")
    return of_job


def missing(status: RunStatus, rank: int | None, job: bool) -> ConfigError:
    """The error for a log that does not exist."""
    out, submitted = status.run.out, status.run.submissions
    logs = [Path(submitted[-1].log)] if submitted and submitted[-1].log else []
    for log in (*([] if job else [out / (f"logs/rank-{rank:05d}.log" if rank else "log.txt")]), *logs):
        if log.exists() and not files.is_file(log):
            return ConfigError(
                f"{files.shown(log)} is no regular file, such as a pipe or a device: it cannot be printed again"
            )
    what = f"logs/rank-{rank:05d}.log" if rank else "log of a job" if job else "log yet"
    kept = sorted(path.name for path in (out / "logs").glob(f"rank-{'[0-9]' * 5}.log"))
    ranks = f"; ranks with a log: 0 to {int(kept[-1][5:10])}" if rank and kept else ""
    later = f"; the job will print to {submitted[-1].log}" if status.live and submitted and submitted[-1].log else ""
    where = f" ({status.where()})" if status.where() else ""
    return ConfigError(f"{files.shown(out)} has no {what}{ranks}; it is {status.name}{where}{later}")


def over(out: Path, queue: Queue) -> Callable[[], bool]:
    """A function that returns whether the run is over, as far as can be seen from here, and then prints how it ended."""

    def is_over() -> bool:
        run = folders.read(out)
        [status] = queue.statuses([run])
        if run.holder is None and run.trained and run.summary.get("state") in ("done", "stopped"):
            status = status_of(run, {})  # it has ended, whatever Slurm still has to do
        elif goes_on(status):
            return False
        note(f"{files.shown(out)} is over: {status.how()}")
        return True

    return is_over


def goes_on(status: RunStatus) -> bool:
    """Whether the run may write more, as far as can be seen from here."""
    return bool(status.live or status.name == "unknown" or status.asked)


def note(text: str) -> None:
    """Print something that is not part of the log."""
    sys.stdout.flush()
    terminal.say(f"hpclm logs: {text}", file=sys.stderr)
