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
STALE = re.compile(r"SLURM_(NTASKS|NPROCS|NTASKS_PER_NODE|TASKS_PER_NODE|CPUS_PER_TASK|GPUS\w*|GRES|DISTRIBUTION)")
"""Requests of the allocation, which srun would apply to its step; the step has its own on the command line."""


def run(config: RunConfig, path: Path, command: Sequence[str] = (), program: Sequence[str] = ()) -> int:
    """Train in the present Slurm allocation with the settings at ``path`` (those of ``config``); returns the exit code.

    ``command``: what the user typed, for the record; ``program``: what runs instead of training. ConfigError outside
    an allocation, or in one that is too small.
    """
    env = environment.inherited()
    allocation = env.get("SLURM_JOB_ID")
    if not allocation:
        raise ConfigError(
            f"--interactive runs inside a Slurm allocation, but SLURM_JOB_ID is not set; get one first with "
            f"{salloc_command(config.job)}"
        )
    code, shown, error = slurm.ask(["scontrol", "show", "job", "-o", allocation], 30.0, env)
    if code:
        raise ConfigError(f"scontrol show job {allocation}: {error.strip()}; is the allocation over?")
    wrong = list(too_small(config, shown))
    if wrong:
        raise ConfigError(wrong)
    nodes, each = config.job.nodes, config.job.gpus
    env = {name: value for name, value in env.items() if not STALE.fullmatch(name)} | config.job.env
    env[SECRET] = secrets.token_hex(16)
    inside = "SLURM_STEP_ID" in env

    notes = [
        f"srun in allocation {allocation}: {nodes * each} processes, {each} on each of {nodes} node{'s' * (nodes != 1)}",
        *local.unused(config.job, "interactive"),
    ]
    log = foreground.begin(config, "srun", (nodes, each), notes, command)
    words = srun(config.job, program or local.train(path), gpus(shown), inside)
    return foreground.run("srun", words, env, log, SIGNALS)


def salloc_command(job: JobConfig) -> str:
    """The salloc command that fits the settings."""
    cpus = f" --cpus-per-task={job.cpus_per_task}" * bool(job.cpus_per_task)
    return f"salloc --nodes={job.nodes} --ntasks-per-node={job.gpus} --gpus-per-node={job.gpus}{cpus}"


def srun(job: JobConfig, program: Sequence[str], gpus_there: int, inside: bool) -> list[str]:
    """The srun command: with every count, and ending all ranks when one fails.

    ``gpus_there``: of each node of the allocation; ``inside``: whether this process is in a step, which holds the
    resources.
    """
    each = job.gpus
    words = ["srun", f"--nodes={job.nodes}", f"--ntasks={job.nodes * each}", f"--ntasks-per-node={each}"]
    words += [f"--gpus-per-node={each}"] * bool(gpus_there)
    words += [f"--cpus-per-task={job.cpus_per_task}"] * bool(job.cpus_per_task)
    words += ["--overlap"] * inside
    return [*words, "--kill-on-bad-exit=1", "--wait=60", "--unbuffered", "--input=none", "--export=ALL", *program]


def gpus(told: str) -> int:
    """GPUs per node of a job, from the output of scontrol."""
    nodes = _number(told, r"\bNumNodes=(\d+)")
    if match := re.search(
        r"\bTresPerNode=\S*?gres[:/]gpu(?::[^:=,\s]*[a-z][^:=,\s]*)?(?:[:=](\d+))?", told, re.IGNORECASE
    ):
        return int(match[1] or 1)
    return _number(told, r"\bTRES=\S*?gres/gpu=(\d+)") // max(nodes, 1)


def too_small(config: RunConfig, told: str) -> list[str]:
    """What the allocation, as scontrol describes it, lacks for the settings."""
    job = config.job
    nodes, cpus, there = _number(told, r"\bNumNodes=(\d+)"), _number(told, r"\bNumCPUs=(\d+)"), gpus(told)
    out = f"; leave it and get {salloc_command(job)}"
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
