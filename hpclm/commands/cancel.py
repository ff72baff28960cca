"""``hpclm cancel``: have a run save and exit, and keep Slurm from starting it again."""

import argparse
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpclm import cli, files, terminal
from hpclm.errors import HpclmError
from hpclm.node.processes import NoAnswerError
from hpclm.node.slurm import JobState
from hpclm.rundir import control_files
from hpclm.rundir import runs as folders
from hpclm.rundir.lock import HolderWatch
from hpclm.rundir.runs import Run
from hpclm.rundir.status import process_here, query
from hpclm.scheduler import Scheduler, named, of_run
from hpclm.terminal import say

PATIENCE = 10.0  # seconds squeue may take
POLL = 0.5  # seconds between checks whether it has exited
PROGRESS = 10.0  # seconds between progress lines without a terminal
ENDED = 10.0  # seconds that a job may take to end after its run
SILENT = 120.0  # seconds without a heartbeat after which no process of a run is alive
COMPLETING = 30.0  # seconds that Slurm may take to end a job whose run has ended
UNHEARD = 20.0  # seconds after which a run that ignores the signal gets a stop file


@dataclass(frozen=True)
class Target:
    """A job or process of a run that was asked to exit."""

    scheduler: Scheduler
    job: JobState
    name: str
    urgency: "Urgency | None" = None
    """For a job of a scheduler that may not be able to comply."""


def main(argv: list[str]) -> int:
    """``hpclm cancel``."""
    parser = cli.run_parser(
        "cancel",
        "End runs: each finishes its current step, saves and exits, and Slurm does not start it again. 'hpclm resume' "
        "continues it.",
        run=cli.SEVERAL,
        nargs="+",
        wait="how long to wait until they have exited",
    )
    parser.add_argument("--now", action="store_true", help="do not let them save")
    args = parser.parse_args(argv)
    if args.wait < 0:
        parser.error("--wait must be at least 0")
    chosen = folders.choose(args.run, args.runs)
    each, found = cli.Each(len(chosen)), dict[Path, list[Target]]()
    for out in chosen:
        with each:
            found[out] = stop(out, args.now)
    late = wait([target for told in found.values() for target in told], args.wait)
    for out, told in found.items():
        with each:
            conclude(out, [target for target in told if target in late], bool(told), args)
    return each.code


def stop(out: Path, now: bool) -> list[Target]:
    """Ask all jobs and processes of a run to exit; returns them."""
    folders.check_own(out, "cancelled")
    if other := folders.other_owner(out):
        say(f"{files.shown(out)} belongs to {other}, and root may cancel it")
    run = folders.read(out)
    found = targets(run, now)
    for target in found:
        if now:
            target.scheduler.cancel(target.job.id)
        else:
            target.scheduler.stop(target.job, run.attempt, PATIENCE)
        saves = not now and not target.job.waits
        say(f"{target.name}: {'asked to save and exit' if saves else 'cancelled'}", flush=True)
    if not found:
        status = query([run], PATIENCE)[0]
        say(f"{files.shown(out)} is not running: {status.how()}")
    return found


def conclude(out: Path, late: list[Target], told: bool, args: argparse.Namespace) -> None:
    """Print the outcome for a run that was asked to exit; HpclmError if something of it has not exited."""
    if late:
        again = "" if args.now else f", or end it without saving: hpclm cancel --now {files.typed(out)}"
        raise HpclmError(
            f"{', '.join(target.name for target in late)} has not exited after {args.wait:g} s; Slurm will not start it "
            f"again. Look at it with hpclm status {files.typed(out)}{again}"
        )
    if told:
        (out / "stop").unlink(missing_ok=True)  # or it would end the next attempt
        say(outcome(out))


def targets(run: Run, now: bool) -> list[Target]:
    """All jobs and processes of a run; HpclmError if it runs on a host that cannot be reached from here."""
    if found := live_jobs(run, now):
        return found
    here = process_here(run)
    if here is not None:
        scheduler = named("local")
        jobs = scheduler.states([str(here)])
        return [Target(scheduler, job, f"process {here}") for job in jobs.values()]
    holder = run.holder
    if holder and holder.get("host") != socket.gethostname() and not run.attempt.get("job_id"):
        raise HpclmError(
            f"{files.shown(run.out)} was last used by process {holder.get('pid')} on {holder.get('host')}, which has not released it; "
            f"if it still runs, cancel it there: ssh {holder.get('host')} hpclm cancel {files.typed(run.out.absolute())}"
        )
    return []


def live_jobs(run: Run, now: bool) -> list[Target]:
    """Jobs of a run that are pending or running; HpclmError if neither the scheduler nor the run's files tell."""
    from hpclm.launch import send

    scheduler = of_run([each.cluster for each in run.submissions if each.is_job], run.owner)[-1]
    unrecorded = []
    if (run.out / "job").is_dir():
        with suppress(NoAnswerError):  # asked again below
            unrecorded = [job.job_id for job in send.queued(run.out, scheduler, PATIENCE)]
    jobs = list(dict.fromkeys([*run.jobs, *unrecorded]))
    for tries in (2, 1) if jobs else ():
        try:
            live = [job for job in scheduler.states(jobs, (), PATIENCE).values() if job.live]
            urgent = [None if job.waits or now else Urgency(run.out, scheduler, job.id) for job in live]
            return [Target(scheduler, job, f"job {job.id}", late) for job, late in zip(live, urgent, strict=True)]
        except NoAnswerError as error:
            if tries == 1 and process_here(run) is None:
                raise HpclmError(
                    f"{error}. Is {files.shown(run.out)} running? Its last job is {run.jobs[-1]}; try again later"
                ) from None
    return []


class Urgency:
    """Ends a job whose run cannot comply: none of its processes is alive, or Slurm's signal did not reach it."""

    def __init__(self, out: Path, scheduler: Scheduler, job: str):
        self.out, self.scheduler, self.job, self.began = out, scheduler, job, time.monotonic()
        self.heartbeat = HolderWatch(out)
        self.cancelled: float | None = None

    def __call__(self) -> None:
        """Check, and act once if it is time."""
        if self.cancelled is not None:
            return
        ended, silent = self.heartbeat.silent()
        if silent > (ENDED if ended else SILENT):
            self.cancelled = time.monotonic()
            why = "its run has ended" if ended else "its run sends no heartbeat"
            say(f"job {self.job}: {why}; the job itself is cancelled", flush=True)
            self.scheduler.cancel(self.job)
        elif not ended and time.monotonic() - self.began > UNHEARD and not (self.out / "stop").exists():
            control_files.create(self.out, "stop")  # a dead slurmstepd forwards no signal


def wait(found: list[Target], seconds: float) -> list[Target]:
    """Wait until all have exited, with progress lines; returns those that have not after ``seconds``."""
    began = told = time.monotonic()
    live = sys.stderr.isatty()
    left = found
    while True:
        left, suspended = still_there(left)
        now = time.monotonic()
        if not left or now - began > seconds:
            break
        for target in left:
            if target.urgency and target not in suspended:
                target.urgency()
        if live or now - told > PROGRESS:
            names = ", ".join(target.name for target in left)
            text, form = f"waiting for {names} to exit: {now - began:.0f} s", "\r{}\033[K" if live else "{}\n"
            print(form.format(terminal.line(text)), end="", file=sys.stderr, flush=True)
            told = now
        time.sleep(POLL)
    if live:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return left


def still_there(found: list[Target]) -> tuple[list[Target], list[Target]]:
    """Those of ``found`` that have not exited, and the suspended jobs among them, whose processes cannot respond.

    Each scheduler is asked once for all its jobs. If it does not answer, they count as running.
    """
    left, suspended = list[Target](), list[Target]()
    for scheduler in dict.fromkeys(target.scheduler for target in found):
        mine = [target for target in found if target.scheduler is scheduler]
        try:
            states = scheduler.states([target.job.id for target in mine], (), PATIENCE)
        except NoAnswerError:
            states = {target.job.id: target.job for target in mine}
        for target in mine:
            job = states.get(target.job.id)
            since = target.urgency.cancelled if target.urgency else None
            completing = job is not None and job.name == "COMPLETING" and since is not None
            if job is None or not job.live or (completing and since and time.monotonic() - since > COMPLETING):
                continue  # the run has ended, whatever Slurm still has to do
            left.append(target)
            suspended += [target] * (job.name in ("SUSPENDED", "STOPPED"))
    return left, suspended


def outcome(out: Path) -> str:
    """The outcome, and how to continue."""
    run = folders.read(out)
    saved = f"saved at step {run.checkpoint[0]}" if run.checkpoint else "nothing is saved"
    lost = max(0, run.step - run.checkpoint[0]) if run.checkpoint else run.step
    done = f"{files.shown(out)} has ended at step {run.step}, {saved}{f', {lost} steps lost' if lost else ''}"
    return (
        f"{done}; continue with: hpclm resume {files.typed(out)}"
        if run.attempt
        else f"{files.shown(out)} has not trained; start: hpclm resume {files.typed(out)}"
    )
