"""Start a run's processes with srun in the foreground, inside an allocation that the person already has (salloc)."""

import re
import secrets
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpclm.cluster import environment
from hpclm.config import JobConfig, RunConfig
from hpclm.errors import ConfigError
from hpclm.job import local
from hpclm.job.through import through

SIGNALS: dict[int, int] = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), signal.SIGUSR1)
"""srun passes USR1 and USR2 on to the ranks; the others end it, and them."""
STALE = re.compile(r"SLURM_(NTASKS|NPROCS|NTASKS_PER_NODE|TASKS_PER_NODE|CPUS_PER_TASK|GPUS\w*|GRES|DISTRIBUTION)")
"""Requests of the allocation that srun would take for its own; what a step asks for is said on its command line."""
PATIENCE = (8.0, 10.0)  # seconds in which srun ends a step's tasks by itself when one fails, and when it is told to


def run(config: RunConfig, path: Path, command: Sequence[str] = (), program: Sequence[str] = ()) -> int:
    """Train in the present Slurm allocation with the settings at ``path`` (those of ``config``); gives the exit code.

    ``command`` is what the person typed, for the ledger; ``program`` what runs instead of training. ConfigError outside
    an allocation, or in one that is too small.
    """
    env = environment.inherited()
    allocation = env.get("SLURM_JOB_ID")
    if not allocation:
        raise ConfigError(
            f"--interactive runs inside a Slurm allocation, and this is none: SLURM_JOB_ID is not set; get one first with "
            f"{wanted(config.job)}"
        )
    try:
        told = subprocess.run(
            ["scontrol", "show", "job", "-o", allocation], env=env, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"scontrol show job {allocation} does not answer: {error}") from None
    if told.returncode:
        raise ConfigError(f"scontrol show job {allocation}: {told.stderr.strip()}; is the allocation over?")
    wrong = list(too_small(config, told.stdout))
    if wrong:
        raise ConfigError(wrong)
    nodes, each = config.job.nodes, config.job.gpus
    env = {name: value for name, value in env.items() if not STALE.fullmatch(name)} | config.job.env
    env["HPCLM_RENDEZVOUS"] = secrets.token_hex(8)
    inside = "SLURM_STEP_ID" in env

    def line(program: Sequence[str]) -> list[str]:
        return srun(config.job, program, gpus(told.stdout), inside)

    count = nodes * each
    notes = [f"srun in allocation {allocation}: {count} processes, {each} on each of {nodes} node{'s' * (nodes != 1)}"]
    notes += local.unused(config.job, "interactive")
    program = program or local.train(path)
    return through("srun", config, line, program, env, (nodes, each, count), SIGNALS, PATIENCE, notes, command)


def wanted(job: JobConfig) -> str:
    """The salloc command for what the settings ask for."""
    cpus = f" --cpus-per-task={job.cpus_per_task}" * bool(job.cpus_per_task)
    return f"salloc --nodes={job.nodes} --ntasks-per-node={job.gpus} --gpus-per-node={job.gpus}{cpus}"


def srun(job: JobConfig, program: Sequence[str], gpus_there: int, inside: bool) -> list[str]:
    """The srun command: counts that leave Slurm nothing to guess, and an end for all when one rank fails.

    ``gpus_there``: of each node of the allocation; ``inside``: whether a step around this one holds its resources.
    """
    each = job.gpus
    words = ["srun", f"--nodes={job.nodes}", f"--ntasks={job.nodes * each}", f"--ntasks-per-node={each}"]
    words += [f"--gpus-per-node={each}"] * bool(gpus_there)
    words += [f"--cpus-per-task={job.cpus_per_task}"] * bool(job.cpus_per_task)
    words += ["--overlap"] * inside
    return [*words, "--kill-on-bad-exit=1", "--unbuffered", "--input=none", "--export=ALL", *program]


def gpus(told: str) -> int:
    """GPUs of each node of a job, from what scontrol says of it."""
    nodes = _number(told, r"\bNumNodes=(\d+)")
    if match := re.search(
        r"\bTresPerNode=\S*?gres[:/]gpu(?::[^:=,\s]*[a-z][^:=,\s]*)?(?:[:=](\d+))?", told, re.IGNORECASE
    ):
        return int(match[1] or 1)
    return _number(told, r"\bTRES=\S*?gres/gpu=(\d+)") // max(nodes, 1)


def too_small(config: RunConfig, told: str) -> list[str]:
    """Sentences on what the allocation, as scontrol describes it, lacks for the settings."""
    job = config.job
    nodes, cpus, there = _number(told, r"\bNumNodes=(\d+)"), _number(told, r"\bNumCPUs=(\d+)"), gpus(told)
    out = f"; leave it and get {wanted(job)}"
    wrong = []
    if nodes < job.nodes:
        wrong.append(f"job.nodes={job.nodes}, but the allocation has {nodes}{out}, or set job.nodes={nodes}")
    if (there or config.engine.device == "cuda") and there < job.gpus:
        wrong.append(f"job.gpus={job.gpus}, but the allocation has {there} on each node{out}, or set job.gpus={there}")
    need = job.gpus * (job.cpus_per_task or 1)
    each = cpus // max(nodes, 1)
    if each < need:
        wrong.append(
            f"job.gpus={job.gpus} processes x job.cpus_per_task={job.cpus_per_task or 1} = {need} CPUs of a node, but the "
            f"allocation has {each}{out}"
        )
    return wrong


def _number(told: str, pattern: str) -> int:
    match = re.search(pattern, told)
    return int(match[1]) if match else 0
