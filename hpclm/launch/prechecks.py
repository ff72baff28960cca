"""Checks of everything that a start would refuse, as far as they need no GPU and no other processes; before a run is queued."""

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm import config, extras, sinks
from hpclm.checkpoint import Progress, resumable
from hpclm.config import JobConfig, RunConfig, no_effect
from hpclm.config.compose import missing_code
from hpclm.config.data import SOURCES
from hpclm.config.engine import ENGINES
from hpclm.config.job import seconds_of
from hpclm.config.length import inside_warmup, run_length
from hpclm.config.model import BLOCKS
from hpclm.config.monitoring import SINKS
from hpclm.config.no_effect import check_finished
from hpclm.config.optim import SCHEDULES
from hpclm.config.optimizers import OPTIMIZERS
from hpclm.config.supports import SUPPORTS
from hpclm.errors import ConfigError
from hpclm.launch import local
from hpclm.launch.schedulers import slurm_commands as slurm
from hpclm.node import notify, secrets
from hpclm.node.processes import NoAnswerError
from hpclm.registry import lookup
from hpclm.rundir import config_history, folder, summary
from hpclm.terminal import say

if TYPE_CHECKING:
    from hpclm.data.sources import Source

WIDEST_BUILT = 2048  # model.hidden up to which a block is built on the login node: 200 MB
SIGNAL = re.compile(r"(?:[A-Z]+:)?\w+@(\d+)")  # of #SBATCH --signal


def check(
    run: RunConfig, cluster: str, queued: bool = False, resume_step: int | None = None, with_data: bool = True
) -> list[str]:
    """ConfigError with every problem, before anything is written; else the settings that would change nothing, in sentences.

    ``cluster``: what starts the run, or "debug"; ``queued``: it will follow a job in the queue; ``resume_step``: the step of
    the checkpoint to continue from; ``with_data``: also what depends on the dataset, which has been written.
    """
    job, debug = run.job, cluster == "debug"  # which starts anew, with synthetic data if the run's are missing
    problems = secrets.problems(asdict(run)) + ([] if debug else run.missing())
    problems += run.engine.problems_on_cpu() + notify.missing(job.notify)
    same_python = not (job.venv or job.conda or job.container or job.modules)  # or the libraries are not known
    if same_python:
        problems += run.missing_libraries()
        if cluster == "mpirun" or job.template == "mpirun":
            problems += filter(None, [extras.missing("starting ranks with mpirun", "mpi4py")])

    def collect(check: Callable[[], Any], hint: str = "") -> Any:
        try:
            return check()
        except ConfigError as error:
            problems.extend(problem + hint for problem in error.problems)

    if not debug and not (cluster == "mpirun" and job.hostfile):
        processes = job.nodes * job.gpus
        hint = f"; this job has job.nodes={job.nodes} x job.gpus={job.gpus} = {processes} processes"
        collect(lambda: run.plan(processes), hint)
    before = len(problems)
    collect(lambda: folder.check(Path(run.out)))
    misplaced = len(problems) > before
    if cluster == "local":
        collect(lambda: local.check(run))
    if cluster not in ("local", "mpirun", "interactive", "debug"):
        problems += missing_paths(run)
    without_code = missing_code(run)
    problems += without_code
    if not without_code:
        collect(lambda: _check_names(run, same_python))
    begin = Progress()
    if not debug and not misplaced:
        begin = collect(lambda: resumable.progress(Path(run.out), resume_step)) or begin
    source: Source | None = None
    if with_data and not debug and not run.missing() and not without_code:
        source = collect(lambda: _check_data(run, begin))
    collect(lambda: _check_init_from(run, source))
    if not debug and not misplaced:
        collect(lambda: _check_history(run, source, resume_step, queued))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return [] if debug else without_effect(run, source, begin)


def without_effect(run: RunConfig, source: "Source | None", begin: Progress) -> list[str]:
    """The settings that would change nothing from ``begin`` on, as far as that is known before the job starts."""
    reasons = list(no_effect.by_settings(run))
    with suppress(ConfigError):  # of a number of processes that is not the job's, as with --debug
        reasons += no_effect.by_processes(run, run.plan(run.job.nodes * run.job.gpus))
    per_epoch = source.per_epoch("train") if source else 0
    length = run_length(run, per_epoch or None, begin.step, begin.samples)
    if short := inside_warmup(run, length):
        reasons.insert(0, short)
    if source:
        from hpclm.data import sources

        reasons += [*no_effect.by_length(run, length), *no_effect.by_epochs(run, length, per_epoch)]
        reasons += sources.without_effect(source)
        reasons += no_effect.by_held_out(run, source.held_out)
    return reasons


def check_files(run: RunConfig, resume_step: int | None) -> None:
    """ConfigError or NoCheckpointError if a file or checkpoint that a single process is to train with is missing, before it
    imports PyTorch, which takes seconds. What else could be wrong, training finds by itself.

    ``resume_step``: as of ``check``.
    """
    folder.check(Path(run.out))
    source = _check_data(run, resumable.progress(Path(run.out), resume_step))
    _check_init_from(run, source)
    _check_history(run, source, resume_step, queued=False)
    resumable.check_fresh_start(Path(run.out) / "checkpoints", run.checkpoint.resume)


def _check_names(run: RunConfig, with_sinks: bool) -> None:
    """ConfigError if the user's own code, package.module:Name, cannot be loaded."""
    names: list[tuple[str, str, Mapping[str, str], str]] = [
        ("model.block", run.model.block, BLOCKS, "hpclm.model.gpt"),
        ("optim.schedule", run.optim.schedule, SCHEDULES, "hpclm.optim.schedules"),
        ("engine.name", run.engine.name, ENGINES, "hpclm.engine"),
    ]
    for kind, name, table, module in names:
        if name not in table:  # hpclm's own are there, and some take seconds to load
            loaded = lookup(kind, name, table, import_module(module).CHECK)
            if kind == "engine.name":
                from hpclm.engine import check_supports

                check_supports(run.engine, run.parallel, run.optim, loaded)
    if run.model.block not in BLOCKS and run.model.hidden <= WIDEST_BUILT:
        import torch

        from hpclm.model import gpt

        gpt.check_blocks(gpt.layers(run.model, run.engine, torch.float32, run.seed))
    if run.optim.name not in OPTIMIZERS:
        _check_optimizer(run)
    for name in run.log.sinks if with_sinks else ():
        if name not in SINKS:
            sinks.lookup(name)


def _check_optimizer(run: RunConfig) -> None:
    """ConfigError if the user's optimizer cannot train in this layout. What needs a GPU, the job finds by itself."""
    from hpclm.engine.user_optimizers import check_optimizer
    from hpclm.optim.trial import NeedsGPUError

    try:
        settings = run.for_engine(run.job.nodes * run.job.gpus)
    except ConfigError:  # reported elsewhere
        settings = run.for_engine(run.parallel.smallest)
    with nullcontext() if run.engine.device == "cpu" else suppress(NeedsGPUError):
        check_optimizer(settings, SUPPORTS.get(run.engine.name))


def _check_data(run: RunConfig, begin: Progress) -> "Source | None":
    """The data's source; ConfigError with every problem of its data from ``begin`` on. No index is built, and no samples are read.

    Of a user-defined source only the name is checked, because building it may take long; it is not returned.
    """
    from hpclm.data import sources, split_by  # imports NumPy

    if run.data.source not in SOURCES:
        lookup("data.source", run.data.source, SOURCES, sources.CHECK)
        return None
    run = split_by.resolved(run)
    source = sources.build(run.data, run.model, run.seed)
    problems = list(sources.needs_eod(run.data, source.eod))
    try:
        length = run_length(run, sources.samples_per_epoch(source), begin.step, begin.samples)
        sources.check_part(source, "train", length.samples)
    except ConfigError as error:
        problems = [*error.problems, *problems]
    for part in source.held_out if run.evaluate.every else ():
        try:
            sources.check_part(source, part, run.evaluation_samples(source.per_epoch(part)))
        except ConfigError as error:
            problems += sources.without_evaluation(source, part, error).problems
    if problems:
        raise ConfigError(problems)
    return source


def _check_init_from(run: RunConfig, source: "Source | None") -> None:
    """ConfigError if the run cannot start from checkpoint.init_from."""
    if run.checkpoint.init_from is None or "dependency" in run.job.options:  # a job before it may make the checkpoint
        return
    from hpclm.checkpoint.fingerprint import fingerprint
    from hpclm.checkpoint.init_from import check_init_from

    now = fingerprint(run.model, run.seed, None if source is None else source.fingerprint, run.optim.name)
    check_init_from(run.checkpoint.init_from, Path(run.out) / "checkpoints", now)


def _check_history(run: RunConfig, source: "Source | None", resume_step: int | None, queued: bool) -> None:
    """ConfigError if the settings do not fit the run's checkpoints, or a job of it that has saved nothing yet."""
    from hpclm.checkpoint.fingerprint import check_fingerprint, fingerprint

    out, path = Path(run.out), Path(run.out) / "config.yaml"
    now = fingerprint(
        run.model, run.seed, None if source is None else source.fingerprint, run.optim.name, _micro_size(run)
    )
    if resume_step is not None or os.path.lexists(out / "checkpoints"):
        checkpoint = resumable.candidate(out, resume_step)
        resumable.check_resumable(checkpoint, run.checkpoint.resume, now)
        if checkpoint and source:
            begin = Progress.of(checkpoint[1].progress)
            length = run_length(run, source.per_epoch("train"), begin.step, begin.samples)
            check_finished(run, begin.step, length.steps)
        if checkpoint:
            return
    if queued and path.is_file():
        before = config.load(path)
        then, new = (
            fingerprint(
                run_config.model,
                run_config.seed,
                optimizer=run_config.optim.name,
                micro_size=run_config.batch.micro_size,
            )
            for run_config in (before, run)
        )
        check_fingerprint(path, then, new)


def _micro_size(run: RunConfig) -> int | str | None:
    """The micro-batch that a start will use: auto, if it will choose another than the last start used; None if that is unknown."""
    size = run.batch.micro_size or config_history.micro_size(Path(run.out))
    if run.batch.micro_size or not size or run.job.hostfile:
        return size
    try:
        replace(run, batch=replace(run.batch, micro_size=size)).plan(run.job.nodes * run.job.gpus)
    except ConfigError:
        return "auto"
    return size


def missing_paths(run: RunConfig) -> list[str]:
    """Paths that are missing from the file system of the run directory, which all nodes share."""
    return [f"{text} does not exist" for text, path in _not_here(run.job) if _is_shared(path, Path(run.out))]


def warn_of_missing_paths(run: RunConfig) -> None:
    """Print what is missing here and may exist on compute nodes."""
    for text, path in _not_here(run.job):
        if not _is_shared(path, Path(run.out)):
            say(f"warning: {text} does not exist here; the job fails if its nodes lack it too", file=sys.stderr)


def _not_here(job: JobConfig) -> Iterator[tuple[str, Path]]:
    """The settings whose paths do not exist here, with the path."""
    paths = [("job.venv", job.venv and f"{job.venv}/bin/activate")]
    paths += [("job.conda", f"{job.conda}/bin/python")] if job.conda and job.conda.startswith("/") else []
    paths += [("job.mounts", mount.partition(":")[0]) for mount in job.mounts]
    image = job.container or ""
    if "://" not in image and (job.runtime == "apptainer" or image.startswith("/")) and job.runtime != "docker":
        paths.append(("job.container", image))
    for setting, text in paths:
        path = Path(text or "/").absolute()
        if not path.exists():
            yield f"{setting}: {path}", path


def _is_shared(path: Path, out: Path) -> bool:
    """Whether ``path`` would be on the file system of ``out``; every machine has a root directory of its own."""
    folder, run_folder = (next(f for f in (p, *p.parents) if f.is_dir()) for p in (path, out))
    return folder != Path("/") and folder.stat().st_dev == run_folder.stat().st_dev


def refuse_without_room(out: Path, script: str) -> None:
    """ConfigError if a job with ``script`` would be warned of its end before it could do a step of the run in ``out``, as far as the
    run's last start shows. Without a time limit of the job, that of its partition counts."""
    options = slurm.options_in(script)
    time, name = options.get("time") or "", "job.time"
    if not time:
        with suppress(NoAnswerError):
            there = slurm.env_for(slurm.clusters(options))
            partition, time = slurm.default_time(options.get("partition") or "", env=there)
            name = f"job.time is not set, and the default of partition {partition}"
    recorded = summary.read(out)
    start, step = recorded.get("start_seconds") or 0.0, recorded.get("step_seconds") or 0.0
    match = SIGNAL.match(options.get("signal") or "")
    warn = int(match[1]) if match else 0
    limit = _seconds(time)
    if limit - warn - start > step:
        return
    took = f", and the last start took {start:.0f} s or more before its first step" if start else ""
    step_text = f", which takes {step:.1f} s" if start and step else ""
    needed = math.ceil((warn + start + step) / 60) + 1
    raise ConfigError(
        f"{name}={time} leaves no room for a step: Slurm's warning comes job.warn_seconds={warn} s before the end{took}{step_text}; "
        f"set job.time to {needed} minutes or more, or a smaller job.warn_seconds that suffices for a save"
    )


def _seconds(time: str) -> float:
    """Seconds of a time limit; infinity for one that is missing or unknown."""
    try:
        return seconds_of(time) if time else math.inf
    except ValueError:  # of the user's own template
        return math.inf
