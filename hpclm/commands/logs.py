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
from hpclm.rundir.lock import Heartbeat
from hpclm.rundir.logs import follow, last, matching, whole
from hpclm.rundir.runs import Run
from hpclm.rundir.status import LATE, Queue, RunStatus, query, status_of

FOLLOWED = 20  # lines that following begins with
PATIENCE = 5.0  # seconds squeue may take
LOOK = 0.5  # seconds between looks for a log that does not exist yet


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
    queue = Queue(PATIENCE)
    path = wanted(run, args.rank, args.job) or await_log(run, args.rank, args.job, queue if args.follow else None)
    if args.follow:
        lines = FOLLOWED if args.lines is None else args.lines
        for line in terminal.lines(follow(path, lines, args.grep, over(run.out, queue))):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    else:
        lines = matching(whole(path), args.grep) if args.lines is None else last(path, args.lines, args.grep)
        sys.stdout.buffer.writelines(terminal.lines(lines))
    return 0


def wanted(run: Run, rank: int | None, job: bool, ask: bool = True) -> Path | None:
    """The requested log, if it exists; the job's if training has not started and no rank was given.

    ``ask``: ask Slurm where the log of a job is that jobs.jsonl does not list.
    """
    if rank:
        path = run.out / "logs" / f"rank-{rank:05d}.log"
        return path if files.is_file(path) else None
    if not job and files.is_file(run.out / "log.txt"):
        return run.out / "log.txt"
    found = None if rank is not None else run.job_log() or (slurm_output(run) if ask else None)
    if found and not job:
        note(f"training has not started; this is the job's log, {found}:")
    return found


def slurm_output(run: Run) -> Path | None:
    """The output file of the newest job according to Slurm, for a job that jobs.jsonl does not list."""
    submitted = {each.job_id for each in run.submissions}
    for job in (job for job in reversed(run.jobs) if job not in submitted):
        try:
            path = slurm.job_log(job, PATIENCE)
        except NoAnswerError:
            return None
        if path and files.is_file(Path(path)):
            return Path(path)
    return None


def await_log(run: Run, rank: int | None, job: bool, queue: Queue | None) -> Path:
    """The requested log, with a ``queue`` as soon as it exists; ConfigError if it never will."""
    said = ""
    while queue:
        [status] = queue.statuses([run])
        if not goes_on(status):
            break
        text = f"waiting for the log; {status.name}{f': {status.where()}' if status.where() else ''}"
        if text != said:
            note(text)
        said = text
        time.sleep(LOOK)
        run = folders.read(run.out)
        if path := wanted(run, rank, job, ask=False):
            return path
    if path := wanted(run, rank, job):
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


def over(out: Path, queue: Queue) -> Callable[[], bool]:
    """A function that returns whether the run is over, as far as can be seen from here, and then prints how it ended.

    Slurm is asked once at the beginning, and later only when the run sends no heartbeats.
    """
    heartbeat = Heartbeat(out)

    def is_over() -> bool:
        run = folders.read(out)
        [status] = queue.statuses([run], ask=heartbeat.silent()[1] > LATE)
        by_files = status_of(run, {})
        finished = run.holder is None and run.unbegun is None and by_files.name == run.ended[0] in ("done", "stopped")
        if goes_on(status) and not finished:
            return False
        note(f"{files.shown(out)} is over: {by_files.how() if finished else status.how()}")
        return True

    return is_over


def goes_on(status: RunStatus) -> bool:
    """Whether the run may write more, as far as can be seen from here."""
    return bool(status.live or status.name == "unknown" or status.asked)


def note(text: str) -> None:
    """Print something that is not part of the log."""
    sys.stdout.flush()
    terminal.say(f"hpclm logs: {text}", file=sys.stderr)
