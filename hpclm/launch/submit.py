"""Start runs: check settings, then train on Slurm, on other machines with mpirun, or locally."""

import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm import config
from hpclm.base import files, paths
from hpclm.base.errors import ConfigError, HpclmError, LockedError
from hpclm.base.terminal import many, say
from hpclm.config import JobConfig, ParallelConfig, RunConfig
from hpclm.config.job import seconds_of
from hpclm.config.settings import is_override
from hpclm.inference.evaluation import TaskRequest
from hpclm.launch import arguments, container, debug, prechecks, process, send, setup, sweep
from hpclm.launch.arguments import SubmitRequest
from hpclm.launch.done import DoneError, before_it, refuse_done, same_length
from hpclm.launch.foreground import Launch
from hpclm.launch.schedulers import JobScript, Scheduler, scheduler_named
from hpclm.node import gpus, secrets
from hpclm.rundir import events, folder
from hpclm.rundir import runs as folders
from hpclm.rundir.state import span

if TYPE_CHECKING:
    from hpclm.preprocess.text_dataset import NamedDataset

STARTED_BY = {"local": "hpclm.launch.local", "mpirun": "hpclm.launch.mpi", "interactive": "hpclm.launch.srun"}


def start(request: SubmitRequest) -> int:
    """Start the runs of ``request``; returns the exit code. ConfigError with every problem, before anything is written."""
    check = partial(_check_before_dataset, request)
    runs = [arguments.compose(request, variant, check) for variant in arguments.variants(request.sweep)]
    command = [*map(secrets.Redactor(), ("hpclm", "submit", *request.typed))]
    where = _where(request, runs[0].job)
    resume_step = request.resume_step
    if len(runs) == 1 and where != "debug" and resume_step is None and _is_toy(request):
        runs = [_own_directory(runs[0])]
    queues = where not in (*STARTED_BY, "debug")
    if len(runs) > 1 and where == "debug":
        raise ConfigError("--debug is for one run, without --sweep")
    if request.parallel is not None and (not request.sweep or where != "local"):
        sweeps = f"a sweep with --cluster local, not with job.cluster={where}" if request.sweep else "--sweep"
        raise ConfigError(f"--parallel is for {sweeps}")
    unwritten = arguments.unwritten(request, runs)
    for dataset in unwritten:
        say(
            f"without --dry-run, the text of data= is first tokenized into {dataset}; the dataset is not checked here",
            file=sys.stderr,
        )
    starts = [
        prechecks.check_submission(run, where, request.again, resume_step, run.data.prefix not in unwritten)
        for run in runs
    ]
    if request.ranks:
        return _ranks(runs, request.ranks, request.gpus_kind)
    if where == "debug":
        changes = debug.overrides(runs[0])
        changed = arguments.compose(request, arguments.Variant(tuple(changes)))
        return debug.run(changed, changes, lambda run: process.start(run, alone=True), request.pdb)
    if not queues and request.dry_run:
        return _preview(where, runs[0])
    runs = [start.run if start.run.data.prefix in unwritten else start.settings for start in starts]
    if not queues and request.sweep:
        return _sweep(where, request, runs, command)
    if not queues:
        return _here(where, runs[0], command, resume_step)
    scheduler = scheduler_named(where)
    scripts = _scripts(scheduler, runs, resume_step, [reason for start in starts for reason in start.without_effect()])
    if request.dry_run:
        return _show(scheduler, runs, scripts)
    return _submit(scheduler, runs, scripts, command, request.again, resume_step)


def from_python(run: RunConfig, resume_step: int | None = None) -> None:
    """Submit ``run`` as a job; ConfigError with every problem, or without a queue."""
    where = queue_of(run.job)
    start = prechecks.check_submission(run, where, resume_step=resume_step)
    run = start.settings
    scheduler = scheduler_named(where)
    scripts = _scripts(scheduler, [run], resume_step, start.without_effect())
    _submit(scheduler, [run], scripts, ["hpclm", "submit", f"{run.out}/config.yaml"], False, resume_step)


def queue_of(job: JobConfig) -> str:
    """The scheduler that the settings of a job choose; ConfigError if they choose a way to run without a queue."""
    where = _of_job(job)
    if where not in STARTED_BY:
        return where
    none = f"job.cluster={where} has no queue"
    if job.cluster == "auto":
        none = "job.hostfile means mpirun, which has no queue" if job.hostfile else "no Slurm here (sbatch not found)"
    raise ConfigError(
        f"{none}; hpclm.train trains in this process, and hpclm submit in a terminal starts several processes"
    )


def _check_before_dataset(request: SubmitRequest, run: RunConfig, dataset: "NamedDataset") -> None:
    """ConfigError if ``run`` could not start, before the text of its data is tokenized."""
    prechecks.check_submission(
        arguments.whole(run), _where(request, run.job), request.again, request.resume_step, with_data=False
    )


def _where(request: SubmitRequest, job: JobConfig) -> str:
    """The way to run: local, mpirun, interactive, debug, or the name of a scheduler."""
    if request.debug or request.interactive:
        return "debug" if request.debug else "interactive"
    where = _of_job(job)
    return "slurm" if request.dry_run and where == "local" and job.cluster == "auto" else where


def _of_job(job: JobConfig) -> str:
    """The way to run that the settings of a job ask for."""
    if job.cluster != "auto":
        return job.cluster
    if job.hostfile:
        return "mpirun"
    return "slurm" if shutil.which("sbatch") else "local"


def _is_toy(request: SubmitRequest) -> bool:
    """Whether the run is the toy model, and the user has not chosen its run directory."""
    words = list(request.settings)
    chosen = {"out", "name"} & set(config.compose.keys_set(words))
    return not chosen and [word for word in words if not is_override(word)] in ([], ["debug"])


def _own_directory(toy: RunConfig) -> RunConfig:
    """``toy``, in runs/debug-2, -3, … if runs/debug has a run that is done, or of another length."""
    run = toy
    number = 1
    while folders.is_run(Path(run.out)):
        status, before = before_it(run)
        if status and not status.finished and (before is None or same_length(run, before)):
            return run  # it continues
        number += 1
        run = replace(toy, name=f"{toy.name}-{number}", out=f"{toy.out}-{number}")
    return run


def _warn(runs: Sequence[RunConfig], reasons: Sequence[str]) -> None:
    """Warn of risks of a job, and of runs that have trained outside of a job. ``reasons``: why settings have no effect."""
    for warning in dict.fromkeys(reasons):  # runs that start at once log it themselves
        say(f"warning: {warning}", file=sys.stderr)
    prechecks.warn_of_missing_paths(runs[0])
    for out in (Path(run.out) for run in runs if folders.is_run(Path(run.out))):
        last = folders.read_run(out).attempt
        if last and (not last.get("job_id") or last.get("launcher") == "local"):
            say(
                f"{out} trained on {last.get('host')} so far, and will continue in a Slurm job; to train on this machine, give --cluster local",
                file=sys.stderr,
            )


def _scripts(
    scheduler: Scheduler, runs: Sequence[RunConfig], resume_step: int | None, reasons: Sequence[str]
) -> list[JobScript]:
    """The job script of each run, after warnings; DoneError if nothing is left to do."""
    _warn(runs, reasons)
    scripts = [_script(scheduler, run) for run in runs]
    if len(runs) == 1 and resume_step is None:
        refuse_done(runs[0])
    return scripts


def _script(scheduler: Scheduler, run: RunConfig) -> JobScript:
    path = Path(run.out) / "config.yaml"
    container.words(run)  # raises ConfigError now for a folder that cannot be mounted
    script = scheduler.script(run, path, list(setup.lines(run, path)), setup.supervisor(run.job, path))
    if scheduler.name == "slurm":
        prechecks.refuse_without_room(Path(run.out), script.text)
    return script


def _show(scheduler: Scheduler, runs: Sequence[RunConfig], scripts: Sequence[JobScript]) -> int:
    """Print the scripts and the scheduler's comments on each."""
    for run, script in zip(runs, scripts, strict=True):
        sys.stdout.write(script.text)
        sys.stdout.flush()
        comment = scheduler.check(script.text)
        if comment:
            say(comment, file=sys.stderr)
        if run.job.time:
            say(f"time limit: {_limit(run.job.time)}", file=sys.stderr)
    return 0


def _preview(where: str, run: RunConfig) -> int:
    """Print the command of mpirun."""
    if where != "mpirun":
        raise ConfigError(f"--dry-run shows the script of a job; job.cluster={where} has none")
    from hpclm.launch import mpi

    sys.stdout.write(mpi.preview(Launch(run)))
    return 0


def _ranks(runs: Sequence[RunConfig], ranks: str, kind: str) -> int:
    """Print the memory and the messages of the given ranks."""
    from hpclm.planning.ranks import parse_ranks, report  # loads torch

    run = runs[0]
    if len(runs) > 1:
        raise ConfigError("--ranks is for one run, without --sweep")
    numbers = parse_ranks(ranks, run.job.nodes * run.job.gpus)
    for line in report(run, numbers, gpus.kind_named(kind)):
        say(line)
    return 0


def _here(where: str, run: RunConfig, command: list[str], resume_step: int | None) -> int:
    """Train in processes started by this one."""
    launch = Launch(run, command, resume_step)
    return int(import_module(STARTED_BY[where]).run(launch))


def _sweep(where: str, request: SubmitRequest, runs: Sequence[RunConfig], command: list[str]) -> int:
    """Train the runs of a sweep in processes started by this one."""
    processes = max(run.job.nodes * run.job.gpus for run in runs)
    parallel = min(request.parallel or 1, len(runs))
    if parallel > 1 and any(sweep.DEVICES in run.job.env for run in runs):
        raise ConfigError(
            f"job.env.{sweep.DEVICES} gives all runs the same GPUs; export it instead, or leave --parallel out"
        )
    shares = sweep.shares_here(parallel, processes, runs)
    runs_of_sweep = sweep.of_variants(runs, arguments.variants(request.sweep), command)
    return sweep.run(runs_of_sweep, partial(sweep.submit_words, where), shares)


def _submit(
    scheduler: Scheduler,
    runs: Sequence[RunConfig],
    scripts: Sequence[JobScript],
    command: list[str],
    again: bool,
    resume_step: int | None,
) -> int:
    """Submit every run. A run that is already queued or done does not affect the other runs."""
    code = 0
    for number, (run, script) in enumerate(zip(runs, scripts, strict=True)):
        if number:
            print()
        try:
            if resume_step is None:
                refuse_done(run)
            job, new = send.send(run, script, command, scheduler, again, resume_step)
        except (DoneError, LockedError) as error:
            if len(runs) == 1:
                raise
            say(f"error: {error}", file=sys.stderr)
            code = code or error.exit_code
            continue
        except HpclmError:
            if len(runs) > 1:
                left = f"not submitted: {len(runs) - number} of {len(runs)} runs"
                print(f"error: {left}; repeat the command to continue", file=sys.stderr)
            raise
        out = files.typed(_short(run.out))
        state = "already queued: an earlier submission was interrupted"
        if new:
            state = f"submitted to cluster {job['slurm_cluster']}" if job["slurm_cluster"] else "submitted"
        limit = f"; time limit {_limit(run.job.time)}" if run.job.time else ""
        nodes = run.job.nodes
        size = run.job.nodes * run.job.gpus
        ranks = f"{many(size, 'process')} on {many(nodes, 'node')}"
        say(f"job {job['job_id']}: {ranks}, {state}{limit}")
        say(f"run directory  {run.out}\nlog            {job['log']}")
        step = events.rollback(Path(run.out))
        if step is not None:
            say(f"rolls back to  step {step}")
        say(f"follow         hpclm logs -f {out}\ncancel         hpclm cancel {out}\nresume         hpclm resume {out}")
        sys.stdout.flush()
    return code


def submit_scoring(out: Path, overrides: list[str], wanted: TaskRequest, words: Sequence[str]) -> str:
    """Submit a job of one process that scores the checkpoints of the run ``out``. Returns a sentence about the job.

    ``overrides``: changes to the run's settings. ``words``: the arguments of ``hpclm evaluate``, without the run and --submit.
    """
    from hpclm.inference import task_names

    folders.check_own(out, "scored")
    task_names.check_task_names(list(wanted.names), wanted.path)
    out = out.absolute()
    run = config.load(out / "config.yaml", list(overrides))
    job = replace(run.job, nodes=1, gpus=1, restarts=0, snapshot=False, template="srun")
    run = replace(run, name=f"{run.name}-scores", out=str(out), job=job, parallel=ParallelConfig())
    scheduler = scheduler_named("slurm" if job.cluster in ("auto", "local", "mpirun", "srun") else job.cluster)
    path = out / "job" / f"evaluate-{time.strftime('%Y%m%d-%H%M%S')}.sbatch"
    score = [setup.interpreter(job), "-P", "-u", "-m", "hpclm", "evaluate", paths.literal(out), *words]
    if job.container:
        score = ["srun", "--export=ALL", *container.words(run), container.PYTHON, *score[1:]]
    script = scheduler.script(run, out / "config.yaml", list(setup.lines(run, path)), score)
    folder.make(out)
    files.write_text(path, script.text)
    with files.locked(out / send.LOCK) as lock:
        job_id = scheduler.submit(script, path, lock).partition(";")[0]
    return (
        f"submitted job {job_id}, which scores the run's checkpoints; its log: {files.shown(out)}/logs/job-{job_id}.log"
    )


def _limit(limit: str) -> str:
    """A time limit in words, because Slurm reads 24:00 as 24 minutes."""
    seconds = seconds_of(limit)
    return span(seconds) if math.isfinite(seconds) else "none"


def _short(out: str) -> str:
    """``out`` relative to the current folder, if it is inside."""
    path = Path(out)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else out
