"""Start a run's processes with srun in the foreground, inside an existing allocation (salloc)."""

import re
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path

from hpclm.config import JobConfig, RunConfig
from hpclm.distributed.signed import SECRET
from hpclm.errors import ConfigError
from hpclm.launch import foreground, local
from hpclm.node import environment, slurm

SIGNALS: dict[int, int] = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), signal.SIGUSR1)
"""srun forwards USR1 and USR2 to the ranks; others end it, and them."""
STALE = re.compile(r"SLURM_(NTASKS|NPROCS|NTASKS_PER_NODE|TASKS_PER_NODE|CPUS_PER_TASK|DISTRIBUTION)")
"""Requests of the allocation, which srun would apply to its step; the step has its own on the command line."""


def run(config: RunConfig, path: Path, command: Sequence[str] = (), program: Sequence[str] = ()) -> int:
    """Train in the present Slurm allocation with the settings at ``path`` (those of ``config``); returns the exit code.

    ``command``: what the user typed, for the record; ``program``: what runs instead of training. ConfigError outside an
    allocation. srun itself refuses one that is too small.
    """
    env, job = environment.inherited(), config.job
    allocation = env.get(slurm.JOB)
    if not allocation:
        cores = f" --cpus-per-task={job.cpus_per_task}" * bool(job.cpus_per_task)
        raise ConfigError(
            f"--interactive runs inside a Slurm allocation, but {slurm.JOB} is not set; get one first with "
            f"salloc --nodes={job.nodes} --ntasks-per-node={job.gpus} --gpus-per-node={job.gpus}{cores}"
        )
    inside = slurm.STEP in env  # which then holds the resources
    env = {name: value for name, value in env.items() if not STALE.fullmatch(name)} | job.env
    env[SECRET] = secrets.token_hex(16)
    per_node = f"{job.gpus} on each of {job.nodes} node{'s' * (job.nodes != 1)}"
    note = f"srun in allocation {allocation}: {job.nodes * job.gpus} processes, {per_node}"
    notes = [note, *local.unused(job, "interactive")]
    log = foreground.begin(config, "srun", (job.nodes, job.gpus), notes, command)
    return foreground.run(srun(job, program or local.train(path), inside), env, log, SIGNALS)


def srun(job: JobConfig, program: Sequence[str], inside: bool) -> list[str]:
    """The srun command: with every count, and ending all ranks when one fails. ``inside``: of another step."""
    line = ["srun", f"--nodes={job.nodes}", f"--ntasks={job.nodes * job.gpus}", f"--ntasks-per-node={job.gpus}"]
    line += [f"--cpus-per-task={job.cpus_per_task}"] * bool(job.cpus_per_task) + ["--overlap"] * inside
    line += ["--propagate=NONE"]  # limits are this shell's otherwise
    return [*line, "--kill-on-bad-exit=1", "--wait=60", "--unbuffered", "--input=none", "--export=ALL", *program]
