"""Checks before a run is queued or started: those of every start (training/start.py), and those of a submission."""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from hpclm import sinks
from hpclm.base import extras
from hpclm.base.errors import ConfigError
from hpclm.base.registry import lookup
from hpclm.base.terminal import say
from hpclm.config import EngineSettings, JobConfig, RunConfig
from hpclm.config.engine import ENGINES
from hpclm.config.job import seconds_of
from hpclm.config.model import BLOCKS
from hpclm.config.monitoring import SINKS
from hpclm.config.optim import SCHEDULES
from hpclm.config.optimizers import OPTIMIZERS
from hpclm.config.supports import SUPPORTS
from hpclm.launch import local
from hpclm.launch.schedulers import slurm_commands as slurm
from hpclm.node.processes import NoAnswerError
from hpclm.rundir import summary
from hpclm.training import callbacks
from hpclm.training.start import Check, RunStart

WIDEST_BUILT = 2048  # largest model.hidden for which a block (200 MB) is built on the login node
SIGNAL = re.compile(r"(?:[A-Z]+:)?\w+@(\d+)")  # the value of #SBATCH --signal


def check_submission(
    run: RunConfig, cluster: str, queued: bool = False, resume_step: int | None = None, with_data: bool = True
) -> RunStart:
    """Run all checks that are possible here, without writing anything. ConfigError names every problem.

    Returns a RunStart that keeps the files that the checks have read. ``cluster``: the launcher, or "debug". ``queued``: the run will
    follow a job in the queue. ``resume_step``: the checkpoint to continue from. ``with_data``: also check the dataset.
    """
    job = run.job
    debug = cluster == "debug"  # a debug run starts anew, with synthetic data if files are missing
    # the libraries of another Python are unknown
    same_python = not (job.venv or job.conda or job.container or job.modules)
    has = {
        "files": True,
        "run": not debug,
        "dataset": with_data,
        "queued": queued,
        "python": same_python,
        "mpirun": same_python and (cluster == "mpirun" or job.template == "mpirun"),
        "processes": not debug and not (cluster == "mpirun" and job.hostfile),
        "local": cluster == "local",
        "other nodes": cluster not in ("local", "mpirun", "interactive", "debug"),
    }
    start = RunStart(run, resume_step, has={name for name, there in has.items() if there})
    start.check(CHECKS)
    return start


CHECKS = (
    Check("mpi4py", {"mpirun"}, lambda _: filter(None, [extras.missing("starting ranks with mpirun", "mpi4py")])),
    Check("local", {"local"}, lambda start: local.check_this_machine(start.run)),
    Check("paths", {"other nodes"}, lambda start: missing_paths(start.run)),
    Check("names", {"code"}, lambda start: _check_names(start.run, "python" in start.has)),
)
"""The checks of a submission."""


def _check_names(run: RunConfig, same_python: bool) -> None:
    """ConfigError if the user's own code, package.module:Name, cannot be loaded."""
    names: list[tuple[str, str, Mapping[str, str], str]] = [
        ("model.block", run.model.block, BLOCKS, "hpclm.model.gpt"),
        ("optim.schedule", run.optim.schedule, SCHEDULES, "hpclm.optim.schedules"),
        ("engine.name", run.engine.name, ENGINES, "hpclm.engine"),
    ]
    for kind, name, table, module in names:
        if name not in table:  # hpclm's own names need no check, and some take seconds to load
            loaded = lookup(kind, name, table, import_module(module).CHECK)
            if kind == "engine.name":
                from hpclm.engine import check_supports

                check_supports(run, loaded)
    own_block = run.model.block not in BLOCKS
    if (own_block or run.model.freeze) and not (own_block and run.model.hidden > WIDEST_BUILT):
        import torch

        from hpclm.engine.weight_names import check_weights
        from hpclm.model import gpt

        specs = gpt.layers(run.model, run.engine, torch.float32, run.seed)
        if own_block:
            gpt.check_blocks(specs)
        check_weights(_for_engine(run), specs)
    if run.optim.name not in OPTIMIZERS:
        _check_optimizer(run)
    if same_python:  # they may use libraries that training does not need
        callbacks.load(run.train.callbacks)
        for name in set(run.log.sinks).difference(SINKS):
            sinks.lookup(name)


def _check_optimizer(run: RunConfig) -> None:
    """ConfigError if the user's optimizer does not declare that it can train in this layout."""
    from hpclm.engine.user_optimizers import check_optimizer

    check_optimizer(_for_engine(run), SUPPORTS.get(run.engine.name))


def _for_engine(run: RunConfig) -> EngineSettings:
    """The settings of the run's engine, in the job's layout."""
    try:
        return run.for_engine(run.job.nodes * run.job.gpus)
    except ConfigError:  # another check reports it
        return run.for_engine(run.parallel.smallest)


def missing_paths(run: RunConfig) -> list[str]:
    """An error for each path in the settings that does not exist on the file system of the run directory, which all nodes share."""
    return [f"{text} does not exist" for text, path in _not_here(run.job) if _is_shared(path, Path(run.out))]


def warn_of_missing_paths(run: RunConfig) -> None:
    """Warn of paths that do not exist here and may exist on compute nodes."""
    for text, path in _not_here(run.job):
        if not _is_shared(path, Path(run.out)):
            say(f"warning: {text} does not exist here; the job fails if its nodes lack it too", file=sys.stderr)


def _not_here(job: JobConfig) -> Iterator[tuple[str, Path]]:
    """The settings whose path does not exist on this machine: a text for messages, and the path."""
    paths = [("job.mounts", mount.partition(":")[0]) for mount in job.mounts]
    if job.venv:
        paths.append(("job.venv", f"{job.venv}/bin/activate"))
    if job.conda and job.conda.startswith("/"):
        paths.append(("job.conda", f"{job.conda}/bin/python"))
    image = job.container or ""
    if "://" not in image and (job.runtime == "apptainer" or image.startswith("/")) and job.runtime != "docker":
        paths.append(("job.container", image))
    for setting, text in paths:
        path = Path(text or "/").absolute()
        if not path.exists():
            yield f"{setting}: {path}", path


def _is_shared(path: Path, out: Path) -> bool:
    """Whether ``path`` would be on the file system of ``out``. The root directory is not shared between machines."""
    folder = _existing(path)
    return folder != Path("/") and folder.stat().st_dev == _existing(out).stat().st_dev


def _existing(path: Path) -> Path:
    """``path``, or the first folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def refuse_without_room(out: Path, script: str) -> None:
    """ConfigError if a job with ``script`` would receive Slurm's warning before it completes a step.

    Times are estimated from the last start of the run in ``out``. A job without a time limit has its partition's limit.
    """
    options = slurm.options_in(script)
    time = options.get("time") or ""
    name = "job.time"
    if not time:
        with suppress(NoAnswerError):
            there = slurm.env_for(slurm.clusters(options))
            partition, time = slurm.default_time(options.get("partition") or "", env=there)
            name = f"job.time is not set, and the default of partition {partition}"
    recorded = summary.read_summary(out)
    start = recorded.get("start_seconds") or 0.0
    step = recorded.get("step_seconds") or 0.0
    match = SIGNAL.match(options.get("signal") or "")
    warn = int(match[1]) if match else 0
    limit = _seconds(time)
    if limit - warn - start > step:
        return
    took = ""
    if start:
        took = f", and the last start took {start:.0f} s or more before its first step"
        if step:
            took += f", which takes {step:.1f} s"
    needed = math.ceil((warn + start + step) / 60) + 1
    raise ConfigError(
        f"{name}={time} leaves no room for a step: Slurm's warning comes job.warn_seconds={warn} s before the end{took}; "
        f"set job.time to {needed} minutes or more, or a smaller job.warn_seconds that suffices for a save"
    )


def _seconds(time: str) -> float:
    """The seconds of a time limit; infinity if it is missing or unknown."""
    try:
        return seconds_of(time) if time else math.inf
    except ValueError:  # from the user's template
        return math.inf
