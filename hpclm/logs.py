"""The verb ``hpclm logs``: print or follow what a run says, any rank of it, or its job."""

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpclm import cli
from hpclm.cluster import slurm
from hpclm.cluster.slurm import Silent
from hpclm.errors import ConfigError
from hpclm.job import runs as folders
from hpclm.job.follow import follow, last, matching, whole
from hpclm.job.runs import Run
from hpclm.job.standing import Standing, look

FOLLOWED = 20  # lines that following begins with
PATIENCE = 5.0  # seconds squeue may take


def main(argv: list[str]) -> int:
    """``hpclm logs``."""
    parser = argparse.ArgumentParser(
        prog="hpclm logs",
        description="Print the log of a run: rank 0's over all attempts, or the job's where training has not begun.",
        epilog="Following ends by itself when the run is over, and with Ctrl-C; it goes on over restarts.",
    )
    parser.add_argument("run", help="run directory, or its name below --runs")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="what rank N printed (default: 0)")
    which.add_argument("--job", action="store_true", help="what the job's script and its processes printed")
    parser.add_argument("--grep", metavar="REGEX", help="only lines that match")
    parser.add_argument(
        "--lines", type=int, metavar="N", help=f"only the last N lines (default: all; with -f, {FOLLOWED})"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs are (default: runs)"
    )
    args = parser.parse_args(argv)
    if args.lines is not None and args.lines < 0:
        parser.error("--lines must be at least 0")
    if args.rank is not None and args.rank < 0:
        parser.error("--rank must be at least 0")
    try:
        re.compile(args.grep or "")
    except re.error as error:
        parser.error(f"--grep {args.grep!r} is no regular expression: {error}")
    run = folders.read(folders.resolve(args.run, args.runs))
    path = wanted(run, args.rank, args.job) or await_log(run, args.rank, args.job, args.follow)
    if args.follow:
        count = FOLLOWED if args.lines is None else args.lines
        for line in follow(path, count, args.grep, over(run.out, say=True)):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    else:
        lines = matching(whole(path), args.grep) if args.lines is None else last(path, args.lines, args.grep)
        sys.stdout.buffer.writelines(lines)
    return 0


def wanted(run: Run, rank: int | None, job: bool) -> Path | None:
    """The log that is asked for, where it is there; where training has not begun and no rank is asked for, the job's."""
    if rank:
        path = run.out / "logs" / f"rank-{rank:05d}.log"
        return path if path.is_file() else None
    if not job and (run.out / "log.txt").is_file():
        return run.out / "log.txt"
    found = None if rank is not None else run.job_log() or slurms(run)
    if found and not job:
        note(f"training has not begun; the job's own log is {found}:")
    return found


def slurms(run: Run) -> Path | None:
    """The file that Slurm says the newest job prints to: for a job that nobody wrote down."""
    for job in reversed(run.jobs):
        try:
            path = slurm.job_log(job, PATIENCE)
        except Silent:
            return None
        if path and Path(path).is_file():
            return Path(path)
    return None


def await_log(run: Run, rank: int | None, job: bool, follows: bool) -> Path:
    """The log that is asked for as soon as it is there; ConfigError when it will not come."""
    ended = over(run.out, say=False)
    while follows and not ended():
        standing = look([run], PATIENCE)[0]
        note(f"waiting for the log; {standing.name}{f': {standing.where()}' if standing.where() else ''}")
        for _ in range(30):
            time.sleep(0.5)
            run = folders.read(run.out)
            path = wanted(run, rank, job)
            if path:
                return path
    path = wanted(run, rank, job)
    if path:
        return path
    standing = look([run], PATIENCE)[0]
    what = f"logs/rank-{rank:05d}.log" if rank else "log of a job" if job else "log yet"
    kept = sorted(int(found.stem.removeprefix("rank-")) for found in (run.out / "logs").glob("rank-[0-9]*.log"))
    ranks = f"; ranks with a log: 0 to {kept[-1]}" if rank and kept else ""
    where = "; ".join(each.log for each in run.submissions[-1:])
    later = f"; the job will print to {where}" if where and standing.live else ""
    raise ConfigError(f"{run.out} has no {what}{ranks}; it is {standing.name} {standing.where()}{later}".rstrip())


def over(out: Path, say: bool) -> Callable[[], bool]:
    """A function that says whether the run is over, as far as can be seen from here; with ``say``, how it ended."""

    def is_over() -> bool:
        standing = look([folders.read(out)], PATIENCE)[0]
        if standing.live or standing.name == "unknown" or standing.asked:
            return False
        if say:
            tell(standing)
        return True

    return is_over


def tell(standing: Standing) -> None:
    """Say how a run ended."""
    note(f"{standing.run.out} is over: {standing.name}{f', {standing.ending}' if standing.ending else ''}")


def note(text: str) -> None:
    """Say something that is not part of the log."""
    sys.stdout.flush()
    print(f"hpclm logs: {text}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
