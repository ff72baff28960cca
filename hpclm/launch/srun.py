"""Start a run's processes with srun: in the foreground inside an allocation (salloc), or from a job's supervisor."""

import re
from collections.abc import Sequence

from hpclm.base.errors import ConfigError
from hpclm.base.terminal import many
from hpclm.launch import child, foreground, local
from hpclm.launch.foreground import Launch
from hpclm.node import environment, slurm

STALE = re.compile(r"SLURM_(NTASKS|NPROCS|NTASKS_PER_NODE|TASKS_PER_NODE|CPUS_PER_TASK|DISTRIBUTION)")
"""Variables with requests of the allocation, which srun would apply to its step. The command line has the step's own requests."""
WAIT = "SLURM_WAIT"
"""Variable with the seconds that the other tasks have to end once a task is done: srun never hears of a dead slurmstepd."""


def run(launch: Launch) -> int:
    """Train in the current Slurm allocation; returns the exit code. ConfigError outside an allocation. srun refuses an
    allocation that is too small."""
    env = environment.inherited()
    job = launch.config.job
    allocation = env.get(slurm.JOB)
    if not allocation:
        cores = f" --cpus-per-task={job.cpus_per_task}" if job.cpus_per_task else ""
        raise ConfigError(
            f"--interactive runs inside a Slurm allocation, but {slurm.JOB} is not set; get one first with "
            f"salloc --nodes={job.nodes} --ntasks-per-node={job.gpus} --gpus-per-node={job.gpus}{cores}"
        )
    options = ["--propagate=NONE", "--unbuffered", "--input=none"]  # otherwise this shell's limits would apply
    if slurm.STEP in env:  # the step of this process holds the resources
        options.append("--overlap")
    env = {name: value for name, value in env.items() if not STALE.fullmatch(name)} | job.env
    env.setdefault(WAIT, "60")
    per_node = f"{job.gpus} on each of {many(job.nodes, 'node')}"
    note = f"srun in allocation {allocation}: {job.nodes * job.gpus} processes, {per_node}"
    notes = [note, *local.unused(job, "interactive")]
    begun = foreground.begin(launch, "srun", (job.nodes, job.gpus), notes)
    line = step(job.nodes, job.gpus, job.cpus_per_task or 0, launch.program(), options)
    return begun.run(line, env, child.SIGNALS)


def step(nodes: int, tasks: int, cores: int, program: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The srun command that starts ``tasks`` processes with ``cores`` (0: unknown) on every node, and ends all if a process fails."""
    counts = [f"--nodes={nodes}", f"--ntasks={nodes * tasks}", f"--ntasks-per-node={tasks}"]
    if cores:
        counts.append(f"--cpus-per-task={cores}")
    return ["srun", *counts, *options, "--kill-on-bad-exit=1", "--export=ALL", *program]
