"""The verb ``hpclm cancel``: let a run save and leave, and keep Slurm from starting it again."""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpclm import cli
from hpclm.cluster import process, slurm
from hpclm.cluster.slurm import Silent, State
from hpclm.errors import HpclmError
from hpclm.job import runs as folders
from hpclm.job.runs import Run
from hpclm.job.standing import look, process_here

PATIENCE = 10.0  # seconds squeue may take
LOOK = 0.5  # seconds between looks whether it has gone
TOLD = 10.0  # seconds between progress lines where there is no terminal
AT_ONCE = 5.0  # seconds after which --now kills
MPI = ("orted", "prted", "prterun", "hydra_bstrap_proxy", "hydra_pmi_proxy")
"""Names of the steps that an mpirun starts for its own daemons."""


@dataclass(frozen=True)
class Target:
    """Something of a run that waits or runs: how to end it, and how to see that it has gone."""

    name: str
    runs: bool
    """Whether it has processes, which can save."""
    end: Callable[[], None]
    gone: Callable[[], bool]


def main(argv: list[str]) -> int:
    """``hpclm cancel``."""
    parser = argparse.ArgumentParser(
        prog="hpclm cancel",
        description="End a run: it finishes its step, saves and leaves, and is not started again by Slurm. "
        "'hpclm resume' goes on with it.",
    )
    parser.add_argument("run", help="run directory, or its name below --runs")
    parser.add_argument("--now", action="store_true", help="do not wait for it to save")
    parser.add_argument(
        "--wait", type=float, default=300, metavar="SECONDS", help="how long to wait for it to leave (default: 300)"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs are (default: runs)"
    )
    args = parser.parse_args(argv)
    if args.wait < 0:
        parser.error("--wait must be at least 0")
    run = folders.read(folders.resolve(args.run, args.runs))
    found = targets(run, args.now)
    if not found:
        standing = look([run], PATIENCE)[0]
        print(f"{run.out} is not running: {standing.name}{f', {standing.ending}' if standing.ending else ''}")
        return 0
    for target in found:
        target.end()
        print(f"{target.name}: {'told to save and leave' if target.runs and not args.now else 'cancelled'}", flush=True)
    late = wait(run.out, found, args.wait)
    if late:
        names = ", ".join(target.name for target in late)
        again = "" if args.now else f", or end it without saving: hpclm cancel --now {shlex.quote(str(run.out))}"
        raise HpclmError(
            f"{names} has not left after {args.wait:g} s, and will not be started again by Slurm; look at it with "
            f"hpclm status {shlex.quote(str(run.out))}{again}"
        )
    print(outcome(run.out))
    return 0


def targets(run: Run, now: bool) -> list[Target]:
    """All of a run that waits or runs; HpclmError where it runs out of reach."""
    found = [of_job(run, job, now) for job in live_jobs(run)]
    if found:
        return found
    here = process_here(run)
    if here is not None:
        return [of_process(here, now)]
    holder = run.holder
    if holder and holder.get("host") != process.host() and not run.attempt.get("job_id"):
        raise HpclmError(
            f"{run.out} was last used by process {holder.get('pid')} on {holder.get('host')}, which has not signed off; "
            f"if it still runs, cancel it there: ssh {holder.get('host')} hpclm cancel {shlex.quote(str(run.out.absolute()))}"
        )
    return []


def live_jobs(run: Run) -> list[State]:
    """The jobs of a run that wait or run; HpclmError when Slurm does not say, and the run's files do not either."""
    from hpclm.job import send

    unrecorded = []
    if (run.out / "job").is_dir():
        with suppress(Silent):  # asked again below
            unrecorded = [job.job_id for job in send.queued(run.out, PATIENCE)]
    jobs = list(dict.fromkeys([*run.jobs, *unrecorded]))
    if not jobs:
        return []
    try:
        states = slurm.states(jobs, (), PATIENCE)
    except Silent:
        try:
            states = slurm.states(jobs, (), PATIENCE)
        except Silent as silent:
            if process_here(run) is not None:
                return []
            raise HpclmError(
                f"{silent}. Is {run.out} running? Its last job is {run.jobs[-1]}; try again later"
            ) from None
    return [state for state in states.values() if state.live]


def of_job(run: Run, job: State, now: bool) -> Target:
    """A job of Slurm's."""

    def end() -> None:
        slurm.update(job.id, requeue=0)  # or Slurm, or the job itself, would start it again once it has left
        if job.waits or now:
            slurm.cancel(job.id)
        else:
            warn(run, job)

    def gone() -> bool:
        try:
            state = slurm.states([job.id], (), PATIENCE).get(job.id)
        except Silent:
            return False
        return state is None or not state.live

    return Target(f"job {job.id}", not job.waits, end, gone)


def warn(run: Run, job: State) -> None:
    """Signal the ranks of a running job, and leave its script and mpirun alone: they end with them.

    scancel without a signal would kill them some seconds later, whether they have saved or not.
    """
    steps = slurm.steps(job.id, PATIENCE)
    if any(name not in MPI for name in steps):
        slurm.send(job.id, "TERM")
        return
    attempt = run.attempt
    if str(attempt.get("job_id")) == job.id and slurm.signal_process(
        job.id, str(attempt.get("host")), int(attempt.get("pid", 0)), "TERM"
    ):
        return
    slurm.send(job.id, "USR2", whole=True)  # the ranks are children of the script, which must pass this warning on


def of_process(pid: int, now: bool) -> Target:
    """A process of this host."""

    def end() -> None:
        if not now:
            process.terminate(pid)
            return
        # a second Ctrl-C ends a run at once
        for number, seconds in ((signal.SIGINT, 0.3), (signal.SIGINT, AT_ONCE), (signal.SIGKILL, 1.0)):
            process.terminate(pid, number)
            if process.wait(pid, seconds):
                return

    return Target(f"process {pid}", True, end, lambda: process.began(pid) is None)


def wait(out: Path, found: list[Target], seconds: float) -> list[Target]:
    """Wait until all have gone, and tell of it; those that have not after ``seconds``."""
    began = told = time.monotonic()
    live = sys.stderr.isatty()
    left = found
    while left := [target for target in left if not target.gone()]:
        now = time.monotonic()
        if now - began > seconds:
            break
        if live or now - told > TOLD:
            text = f"waiting for {', '.join(t.name for t in left)} to leave: {now - began:.0f} s, step {folders.read(out).step}"
            print(f"\r{text}\033[K" if live else text, end="" if live else "\n", file=sys.stderr, flush=True)
            told = now
        time.sleep(LOOK)
    if live:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return left


def outcome(out: Path) -> str:
    """What came of it, and how to go on."""
    run = folders.read(out)
    saved = f"saved at step {run.checkpoint[0]}" if run.checkpoint else "nothing is saved"
    lost = max(0, run.step - run.checkpoint[0]) if run.checkpoint else run.step
    done = f"{out} has ended at step {run.step}, {saved}{f', {lost} steps lost' if lost else ''}"
    return (
        f"{done}; go on with: hpclm resume {shlex.quote(str(out))}"
        if run.attempts
        else f"{out} has not trained; start: hpclm resume {shlex.quote(str(out))}"
    )


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
