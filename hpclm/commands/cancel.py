"""``hpclm cancel``: have a run save and exit, and keep Slurm from starting it again."""

import argparse
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpclm import cli, files, terminal
from hpclm.errors import HpclmError
from hpclm.node import processes, slurm
from hpclm.node.processes import NoAnswerError
from hpclm.node.slurm import State
from hpclm.rundir import control_files
from hpclm.rundir import runs as folders
from hpclm.rundir.lock import Heartbeat
from hpclm.rundir.runs import Run
from hpclm.rundir.status import process_here, query
from hpclm.terminal import say

PATIENCE = 10.0  # seconds squeue may take
POLL = 0.5  # seconds between checks whether it has exited
PROGRESS = 10.0  # seconds between progress lines without a terminal
ENDED = 10.0  # seconds that a job may take to end after its run
SILENT = 120.0  # seconds without a heartbeat after which no process of a run is alive
COMPLETING = 30.0  # seconds that Slurm may take to end a job whose run has ended
UNHEARD = 20.0  # seconds after which a run that ignores the signal gets a stop file
KILL = 5.0  # seconds after which --now kills
MPI = ("orted", "prted", "prterun", "hydra_bstrap_proxy", "hydra_pmi_proxy")
"""Names of the steps that an mpirun starts for its own daemons."""


@dataclass(frozen=True)
class Target:
    """A job or process of a run: how to end it, and how to see that it has exited."""

    name: str
    runs: bool
    """Whether it has processes that can save."""
    end: Callable[[], None]
    gone: Callable[[], bool]
    job: str | None = None
    """The ID of a Slurm job."""
    urgency: "Urgency | None" = None
    """For a Slurm job that was asked to exit."""


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
            found[out] = tell(out, args.now)
    late = wait([target for told in found.values() for target in told], args.wait)
    for out, told in found.items():
        with each:
            conclude(out, [target for target in told if target in late], bool(told), args)
    return each.code


def tell(out: Path, now: bool) -> list[Target]:
    """Ask all jobs and processes of a run to exit; returns them."""
    folders.check_own(out, "cancelled")
    if other := folders.other_owner(out):
        say(f"{files.shown(out)} belongs to {other}, and root may cancel it")
    run = folders.read(out)
    found = targets(run, now)
    for target in found:
        target.end()
        say(f"{target.name}: {'asked to save and exit' if target.runs and not now else 'cancelled'}", flush=True)
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
    found = [of_job(run, job, now) for job in live_jobs(run)]
    if found:
        return found
    here = process_here(run)
    if here is not None:
        return [of_process(here, now)]
    holder = run.holder
    if holder and holder.get("host") != socket.gethostname() and not run.attempt.get("job_id"):
        raise HpclmError(
            f"{files.shown(run.out)} was last used by process {holder.get('pid')} on {holder.get('host')}, which has not released it; "
            f"if it still runs, cancel it there: ssh {holder.get('host')} hpclm cancel {files.typed(run.out.absolute())}"
        )
    return []


def live_jobs(run: Run) -> list[State]:
    """Jobs of a run that are pending or running; HpclmError if neither Slurm nor the run's files tell."""
    from hpclm.launch import send

    unrecorded = []
    if (run.out / "job").is_dir():
        with suppress(NoAnswerError):  # asked again below
            unrecorded = [job.job_id for job in send.queued(run.out, PATIENCE)]
    jobs = list(dict.fromkeys([*run.jobs, *unrecorded]))
    if not jobs:
        return []
    for tries in (2, 1):
        try:
            return [state for state in slurm.states(jobs, (), PATIENCE).values() if state.live]
        except NoAnswerError as error:
            if tries == 1 and process_here(run) is None:
                raise HpclmError(
                    f"{error}. Is {files.shown(run.out)} running? Its last job is {run.jobs[-1]}; try again later"
                ) from None
    return []


def of_job(run: Run, job: State, now: bool) -> Target:
    """How to end a Slurm job."""

    def end() -> None:
        slurm.update(job.id, requeue=0)  # or Slurm, or the job itself, would start it again afterwards
        if job.waits or now:
            slurm.cancel(job.id)
        else:
            warn(run, job)

    urgency = None if job.waits or now else Urgency(run.out, job.id)
    return Target(f"job {job.id}", not job.waits, end, lambda: False, job.id, urgency)


class Urgency:
    """Ends a job whose run cannot comply: none of its processes is alive, or Slurm's signal did not reach it."""

    def __init__(self, out: Path, job: str):
        self.out, self.job, self.began = out, job, time.monotonic()
        self.heartbeat = Heartbeat(out)
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
            slurm.cancel(self.job)
        elif not ended and time.monotonic() - self.began > UNHEARD and not (self.out / "stop").exists():
            control_files.create(self.out, "stop")  # a dead slurmstepd forwards no signal


def warn(run: Run, job: State) -> None:
    """Signal the ranks of a running job, but not its script and mpirun, which exit after them.

    scancel without a signal would kill them some seconds later, whether they have saved or not.
    """
    steps = slurm.steps(job.id, PATIENCE)
    if any(name not in MPI for name in steps):
        slurm.send(job.id, "TERM")
        return
    attempt = run.attempt
    if str(attempt.get("job_id")) != job.id:  # it has just started, and has nothing to save
        slurm.cancel(job.id)
        return
    if slurm.signal_process(job.id, str(attempt.get("host")), int(attempt.get("pid", 0)), "TERM"):
        return
    slurm.send(job.id, "USR2", whole=True)  # the ranks are children of the script, which passes this signal on


def of_process(pid: int, now: bool) -> Target:
    """How to end a process of this host."""

    def end() -> None:
        if not now:
            processes.send_signal(pid)
            return
        # a second Ctrl-C ends a run at once
        for number, seconds in ((signal.SIGINT, 0.3), (signal.SIGINT, KILL), (signal.SIGKILL, 1.0)):
            processes.send_signal(pid, number)
            if processes.wait(pid, seconds):
                return

    return Target(f"process {pid}", True, end, lambda: processes.started(pid) is None)


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

    Slurm is asked once for all jobs. If it does not answer, they count as running.
    """
    jobs = [target.job for target in found if target.job]
    try:
        live = {job: state.name for job, state in slurm.states(jobs, (), PATIENCE).items() if state.live}
    except NoAnswerError:
        live = dict.fromkeys(jobs, "")
    for target in found:  # the run has ended, whatever Slurm still has to do
        since = target.urgency.cancelled if target.urgency else None
        if since and time.monotonic() - since > COMPLETING and live.get(target.job or "") == "COMPLETING":
            del live[target.job or ""]
    left = [target for target in found if (target.job in live if target.job else not target.gone())]
    return left, [target for target in left if live.get(target.job or "") in ("SUSPENDED", "STOPPED")]


def outcome(out: Path) -> str:
    """The outcome, and how to continue."""
    run = folders.read(out)
    saved = f"saved at step {run.checkpoint[0]}" if run.checkpoint else "nothing is saved"
    lost = max(0, run.step - run.checkpoint[0]) if run.checkpoint else run.step
    done = f"{files.shown(out)} has ended at step {run.step}, {saved}{f', {lost} steps lost' if lost else ''}"
    return (
        f"{done}; continue with: hpclm resume {files.typed(out)}"
        if run.attempts
        else f"{files.shown(out)} has not trained; start: hpclm resume {files.typed(out)}"
    )
