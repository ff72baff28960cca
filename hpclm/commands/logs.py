"""``hpclm logs``: print or follow the log of a run, of any rank, or of its job."""

import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpclm import cli, files, terminal
from hpclm.errors import ConfigError
from hpclm.node import slurm
from hpclm.node.processes import NoAnswerError
from hpclm.rundir import runs as folders
from hpclm.rundir.lock import HolderWatch
from hpclm.rundir.logs import follow, last, matching, whole
from hpclm.rundir.runs import Run
from hpclm.rundir.status import LATE, Queue, RunStatus, status_of

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
    queue = Queue(PATIENCE)
    run = folders.read(folders.resolve(args.run, args.runs))
    path = find(run, args.rank, args.job, queue, args.follow)
    if args.follow:
        lines = FOLLOWED if args.lines is None else args.lines
        for line in terminal.lines(follow(path, lines, args.grep, over(run.out, queue))):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    else:
        lines = matching(whole(path), args.grep) if args.lines is None else last(path, args.lines, args.grep)
        sys.stdout.buffer.writelines(terminal.lines(lines))
    return 0


def find(run: Run, rank: int | None, job: bool, queue: Queue, wait: bool) -> Path:
    """The requested log; if ``wait``, as soon as it exists. ConfigError if it never will."""
    noted, ask = "", True
    while not (path := existing(run, rank, job, ask)):
        [status] = queue.statuses([run])
        if not (wait and goes_on(status)):
            raise missing(status, rank, job)
        text = f"waiting for the log; {status.name}{f': {status.where()}' if status.where() else ''}"
        if text != noted:
            note(text)
        noted, ask = text, False
        time.sleep(LOOK)
        run = folders.read(run.out)
    return path


def existing(run: Run, rank: int | None, job: bool, ask: bool) -> Path | None:
    """The requested log, if it exists; the job's if training has not started and no rank was given.

    ``ask``: ask Slurm where the log of a job is that jobs.jsonl does not list.
    """
    if rank:
        path = run.out / "logs" / f"rank-{rank:05d}.log"
        return path if files.is_file(path) else None
    if not job and files.is_file(run.out / "log.txt"):
        return run.out / "log.txt"
    of_job = None if rank is not None else run.job_log() or (slurm_output(run) if ask else None)
    if of_job and not job:
        note(f"training has not started; this is the job's log, {of_job}:")
    return of_job


def slurm_output(run: Run) -> Path | None:
    """The output file of the newest job according to Slurm, for a job that jobs.jsonl does not list."""
    submitted = {each.job_id for each in run.submissions}
    with suppress(NoAnswerError):
        for job in (job for job in reversed(run.jobs) if job not in submitted):
            path = slurm.shown("job", job, PATIENCE).get("StdOut")
            if path and files.is_file(Path(path)):
                return Path(path)
    return None


def missing(status: RunStatus, rank: int | None, job: bool) -> ConfigError:
    """The error for a log that does not exist."""
    out, submitted = status.run.out, status.run.submissions
    what = f"logs/rank-{rank:05d}.log" if rank else "log of a job" if job else "log yet"
    kept = sorted(path.name for path in (out / "logs").glob(f"rank-{'[0-9]' * 5}.log"))
    ranks = f"; ranks with a log: 0 to {int(kept[-1][5:10])}" if rank and kept else ""
    later = f"; the job will print to {submitted[-1].log}" if status.live and submitted and submitted[-1].log else ""
    return ConfigError(f"{files.shown(out)} has no {what}{ranks}; it is {status.name} {status.where()}{later}".rstrip())


def over(out: Path, queue: Queue) -> Callable[[], bool]:
    """A function that returns whether the run is over, as far as can be seen from here, and then prints how it ended.

    Slurm is asked once at the beginning, and later only when the run sends no heartbeats.
    """
    heartbeat = HolderWatch(out)

    def is_over() -> bool:
        run = folders.read(out)
        [status] = queue.statuses([run], ask=heartbeat.silent()[1] > LATE)
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
