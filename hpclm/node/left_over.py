"""Processes that earlier attempts of a run left on this machine."""

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from hpclm.node import processes, secrets

DAEMONS = ("slurmd", "slurmstepd")
TRAINS = re.compile(r"\bhpclm([.]| )train( |$)|\btrain\.py( |$)")


def left_over(out: Path, ranks: Collection[int], env: Mapping[str, str] = os.environ) -> list[psutil.Process]:
    """Processes on this machine of earlier attempts of the run in ``out``, or of this Slurm job, with their children.

    ``ranks`` are the PIDs of this attempt here. They, their children and ancestors are spared, and so is every process that
    started after the first of them. The caller holds the lock of the run directory, so any other process that trains there
    is left over.
    """
    attempt = [psutil.Process(pid) for pid in {os.getpid(), *ranks} if processes.started(pid)]
    began = min((process.create_time() for process in attempt), default=0)
    spared = {relative for process in attempt for relative in (process, *process.parents(), *_descendants(process))}
    old: set[psutil.Process] = set()
    for process in processes.of_this_user():
        with suppress(psutil.Error, OSError):
            earlier = process.create_time() < began and process not in spared
            if earlier and (_is_of_earlier_start(process, env) or _trains_in(process, out.resolve())):
                old |= {process, *_descendants(process)}
    return sorted(old - spared, key=lambda process: process.pid)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(process.children(recursive=True))
    return []


def _is_of_earlier_start(process: psutil.Process, env: Mapping[str, str]) -> bool:
    """Whether it was started by this Slurm job before its last requeue."""
    job, variables = env.get("SLURM_JOB_ID"), process.environ()
    if not job or variables.get("SLURM_JOB_ID") != job or process.name() in DAEMONS:
        return False
    return int(variables.get("SLURM_RESTART_COUNT", 0)) < int(env.get("SLURM_RESTART_COUNT", 0))


def _trains_in(process: psutil.Process, out: Path) -> bool:
    """Whether Python trains there: it has a log or the lock of the run directory ``out`` open for writing.

    srun, mpirun and torchrun, whose command lines contain the same words, are another program or an ancestor of the ranks.
    """
    command = process.cmdline()
    if not Path(command[0]).name.startswith("python") or not TRAINS.search(" ".join(command)):
        return False
    opened = [Path(file.path) for file in process.open_files() if file.mode != "r"]
    written = {out / name for name in ("lock", "log.txt", "metrics.jsonl")}
    return any(path in written or path.parent == out / "logs" for path in opened)


def described(process: psutil.Process) -> str:
    """A process in one line."""
    with suppress(psutil.Error):
        return f"{process.pid}: {secrets.Redactor().command(process.cmdline())[:200]}"
    return str(process.pid)
