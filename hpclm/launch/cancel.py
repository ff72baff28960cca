"""Make runs save and exit, and prevent Slurm from restarting them."""

import getpass
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import HpclmError
from hpclm.base.terminal import say
from hpclm.launch import send
from hpclm.launch.jobs import jobs_by_scheduler, state
from hpclm.launch.schedulers import Scheduler, scheduler_named
from hpclm.node import failures
from hpclm.node.job import Job
from hpclm.node.processes import NoAnswerError
from hpclm.rundir import control_files, events
from hpclm.rundir import runs as folders
from hpclm.rundir.lease import HolderWatch, is_here
from hpclm.rundir.runs import RunFacts
from hpclm.rundir.state import process_here

PATIENCE = 10.0  # seconds for squeue to answer
POLL = 0.5  # seconds between checks
PROGRESS = 10.0  # seconds between progress lines
ENDED = 10.0  # seconds for a job to end after its run
SILENT = 120.0  # seconds without a heartbeat after which a run's processes count as dead
COMPLETING = 30.0  # seconds for Slurm to complete a cancelled job
UNHEARD = 20.0  # seconds after which a run that ignores the signal gets a stop file


@dataclass(eq=False)
class Target:
    """A job or process of a run that was asked to exit."""

    out: Path
    scheduler: Scheduler
    job: Job
    name: str
    saves: bool
    """Whether the run saves before it exits."""
    asked: float = field(default_factory=time.monotonic)
    cancelled: float | None = None
    """When the job itself was cancelled because its run could not comply."""

    def __post_init__(self) -> None:
        self.watch = HolderWatch(self.out)

    def ended(self, now: Job | None) -> bool:
        """Whether it has exited. ``now``: its job as the scheduler shows it. After a cancellation, Slurm's clean-up may go on."""
        if now is None or not now.live:
            return True
        completing = now.name == "COMPLETING" and self.cancelled is not None
        return completing and time.monotonic() - (self.cancelled or 0) > COMPLETING

    def insist(self) -> None:
        """Cancel a job without live processes; create a stop file if Slurm's signal did not reach the processes."""
        if not self.saves or self.cancelled is not None:
            return
        ended, silent = self.watch.silent()
        patience, why = (ENDED, "its run has ended") if ended else (SILENT, "its run sends no heartbeat")
        if silent > patience:
            self.cancelled = time.monotonic()
            say(f"{self.name}: {why}; the job itself is cancelled", flush=True)
            self.scheduler.cancel(self.job.id)
        elif not ended and time.monotonic() - self.asked > UNHEARD and not (self.out / "stop").exists():
            control_files.create(self.out, "stop")  # a dead slurmstepd forwards no signal


def cancel(chosen: Sequence[Path], now: bool, seconds: float) -> int:
    """End runs, without saving if ``now``. Wait until they have exited, at most ``seconds``; returns the exit code."""
    per_run = failures.PerRunErrors(len(chosen))
    stopped = dict[Path, list[Target]]()
    for out in chosen:
        with per_run:
            stopped[out] = stop(out, now)
    late = wait([target for targets in stopped.values() for target in targets], seconds)
    for out, targets in stopped.items():
        with per_run:
            names = ", ".join(target.name for target in targets if target in late)
            if names:
                again = "" if now else f", or end it without saving: hpclm cancel --now {files.typed(out)}"
                raise HpclmError(
                    f"{names} has not exited after {seconds:g} s; Slurm will not start it again. "
                    f"Look at it with hpclm status {files.typed(out)}{again}"
                )
            if targets:
                (out / "stop").unlink(missing_ok=True)  # it would end the next attempt
                say(outcome(out))
    return per_run.code


def stop(out: Path, now: bool) -> list[Target]:
    """Ask all jobs and processes of a run to exit; returns them."""
    folders.check_own(out, "cancelled")
    other = folders.other_owner(out)
    if other:
        say(f"{files.shown(out)} belongs to {other}; cancelling it as root")
    run = folders.read_run(out)
    targets = [*jobs_of(run, now)] or [*processes_of(run)]
    for target in targets:
        if now:
            target.scheduler.cancel(target.job.id)
        else:
            target.scheduler.stop(target.job, run.attempt, PATIENCE)
        record(out)
        saves = not now and not target.job.waits
        say(f"{target.name}: {'asked to save and exit' if saves else 'cancelled'}", flush=True)
    if not targets:
        say(f"{files.shown(out)} is not running: {state(out, PATIENCE).how()}")
    return targets


def record(out: Path) -> None:
    """Add an event with the user who cancels the run; if it cannot be written, only warn."""
    try:
        events.append(out, "cancelled", by=getpass.getuser())
    except OSError as error:
        say(f"warning: {out / events.NAME} cannot be written: {error.strerror}", file=sys.stderr)


def jobs_of(run: RunFacts, now: bool) -> Iterator[Target]:
    """The pending and running jobs of a run; HpclmError if the scheduler does not answer, and no process runs here."""
    jobs = jobs_by_scheduler(run)
    if not jobs:  # a command that was killed may have submitted a job without recording it
        jobs[scheduler_named("slurm").for_script(send.last_script(run.out))] = []
    if (run.out / "job").is_dir():
        for scheduler, recorded in jobs.items():
            with suppress(NoAnswerError):  # the question below reports it
                unrecorded = {job.id for job in send.queued(run.out, scheduler, PATIENCE)}
                recorded += sorted(unrecorded - {*recorded})
    try:
        states = {scheduler: scheduler.states(ids, (), PATIENCE) for scheduler, ids in jobs.items() if ids}
    except NoAnswerError as error:
        if process_here(run) is not None:
            return
        raise HpclmError(
            f"{error}. Is {files.shown(run.out)} running? Its last job is {run.jobs[-1]}; try again later"
        ) from None
    for scheduler, job_states in states.items():
        for job in job_states.values():
            if job.live and run.owns(job):
                yield Target(run.out, scheduler, job, f"job {job.id}", saves=not (job.waits or now))


def processes_of(run: RunFacts) -> Iterator[Target]:
    """The process of a run on this machine; HpclmError if it runs on another host."""
    here = process_here(run)
    holder = run.holder
    if here is not None:
        scheduler = scheduler_named("local")
        for job in scheduler.states([str(here)]).values():
            yield Target(run.out, scheduler, job, f"process {here}", saves=False)
    elif holder and not is_here(holder) and not run.attempt.get("job_id"):
        raise HpclmError(
            f"process {holder.get('pid')} on {holder.get('host')} was the last to use {files.shown(run.out)}, and has not released it; "
            f"if it still runs, cancel it there: ssh {holder.get('host')} hpclm cancel {files.typed(run.out.absolute())}"
        )


def wait(left: list[Target], seconds: float) -> list[Target]:
    """Wait until all have exited, with progress lines. Returns those that have not exited after ``seconds``."""
    began = reported = time.monotonic()
    while True:
        left = [target for scheduler in {target.scheduler for target in left} for target in running(scheduler, left)]
        now = time.monotonic()
        if not left or now - began > seconds:
            return left
        if now - reported > PROGRESS:
            names = ", ".join(target.name for target in left)
            say(f"waiting for {names} to exit: {now - began:.0f} s", file=sys.stderr, flush=True)
            reported = now
        time.sleep(POLL)


def running(scheduler: Scheduler, targets: list[Target]) -> Iterator[Target]:
    """The scheduler's ``targets`` that have not exited; all of them if it does not answer."""
    mine = [target for target in targets if target.scheduler is scheduler]
    try:
        states = scheduler.states([target.job.id for target in mine], (), PATIENCE)
    except NoAnswerError:
        states = {target.job.id: target.job for target in mine}
    for target in mine:
        job = states.get(target.job.id)
        if not target.ended(job):
            if job and job.name not in ("SUSPENDED", "STOPPED"):  # a suspended process cannot respond
                target.insist()
            yield target


def outcome(out: Path) -> str:
    """A line on the outcome, and how to continue."""
    run = folders.read_run(out)
    if not run.attempt:
        return f"{files.shown(out)} has not trained; next: hpclm resume {files.typed(out)}"
    saved = "nothing is saved"
    if run.checkpoint:
        saved = f"saved at step {run.saved_step}"
    lost = max(0, run.step - (run.saved_step or 0))
    ended = f"stopped at step {run.step}, {saved}, {lost} steps lost" if lost else f"stopped and {saved}"
    return f"{files.shown(out)} {ended}; next: hpclm resume {files.typed(out)}"
