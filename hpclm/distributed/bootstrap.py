"""Detect the rank of this process from the environment variables of its launcher.

Variables leak: a job submitted from inside a step, or srun under mpirun, inherits the variables of the outer launcher. Contradictions are
refused here, before anything waits for processes that will never start.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpclm.base.errors import ConfigError, ExitCode
from hpclm.node import slurm
from hpclm.node.job import OwnJob

Env = Mapping[str, str]


@dataclass(frozen=True)
class World:
    """The position of this process among all processes of the run."""

    launcher: str
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    run_id: str = ""
    """Identifies this start of the run: the same for all ranks, different at the next start."""
    hosts: tuple[str, ...] = ()
    """The host of each rank; empty if the launcher does not name them."""
    masters: tuple[str, ...] = ()
    """Names and addresses of rank 0's node, or of torchrun's store. The other ranks try them all."""
    began: float = field(default_factory=time.time, compare=False)
    """When training began in this process, in seconds since 1970; for a command, when the process started."""


def detect(env: Env = os.environ, alone: bool = True) -> World:
    """The world of this process; ConfigError if the launcher's variables contradict each other.

    ``alone=False``: refuse a process that no launcher started in a Slurm job of several tasks, because its peers are missing.
    """
    launchers = (read for variable, read in LAUNCHERS if variable in env)
    world = next(launchers, lambda _: World("single", 0, 1))(env)
    problems = list(_contradictions(world, env, alone))
    if problems:
        raise ConfigError(problems)
    return world


SRUN = "Slurm"
"""The launcher srun."""


def _torchrun(env: Env) -> World:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = _values("torchrun", env, int, *names)
    # torchrun keeps its id when it restarts the ranks, but this start must not read keys of the last one
    run_id = f"{env['TORCHELASTIC_RUN_ID']}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    launcher = "local" if env.get("HPCLM_LAUNCHER") == "local" else "torchrun"  # local: started by hpclm on one machine
    return World(launcher, rank, size, local_rank, local_size, run_id, masters=(env.get("MASTER_ADDR", ""),))


def _open_mpi(env: Env) -> World:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return World("Open MPI", *_values("Open MPI", env, int, *(f"OMPI_COMM_WORLD_{name}" for name in names)))


def _hydra(env: Env) -> World:
    return World("MPI", *_values("MPI", env, int, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _srun(env: Env) -> World:
    # variables of the step, not of the job: srun may use fewer nodes, and the job's variables are stale after a requeue
    rank, size, local_rank, node = _values(SRUN, env, int, *slurm.NUMBERS_OF_RANK)
    nodes, tasks, _ = _values(SRUN, env, str, slurm.NODES_OF_STEP, slurm.TASKS_OF_NODES, slurm.JOB)
    counts = slurm.tasks_per_node(tasks)
    names = slurm.expand(nodes)
    if len(names) != len(counts) or node >= len(counts):
        raise ConfigError(
            f"{slurm.NODES_OF_STEP}={nodes}, {slurm.TASKS_OF_NODES}={tasks} and {slurm.NODE_OF_STEP}={node} contradict each other"
        )
    order = env.get(slurm.DISTRIBUTION, "block")
    hosts: list[str] = []
    if order.startswith("block"):
        hosts = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    masters = names if order == "arbitrary" else names[:1]  # a host file may put rank 0 on any node
    masters = [*masters, *slurm.addresses(env)]
    return World(SRUN, rank, size, local_rank, counts[node], slurm.run_id(env), tuple(hosts), tuple(masters))


# The first row whose variable is set wins. Launchers nest, so the innermost come first: torchrun and mpirun run inside
# steps of srun.
LAUNCHERS: tuple[tuple[str, Callable[[Env], World]], ...] = (
    ("TORCHELASTIC_RUN_ID", _torchrun),
    ("OMPI_COMM_WORLD_RANK", _open_mpi),
    ("MPI_LOCALRANKID", _hydra),  # MPICH and Intel MPI
    (slurm.STEP, _srun),
)


OF_MPI = ("Open MPI", "MPI")
"""Launchers that use MPI."""


OTHERS = {
    SRUN: (slurm.TASKS,),
    **dict.fromkeys(OF_MPI, (slurm.TASKS_OF_STEP,)),  # mpirun has at most as many daemons as ranks
    **dict.fromkeys(("torchrun", "local"), ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")),
    "single": ("WORLD_SIZE", "PMI_SIZE"),
}
"""Variables of other launches, by launcher: if one counts more processes than this launch has, it has leaked."""


def _contradictions(world: World, env: Env, alone: bool) -> Iterator[str]:
    launcher = world.launcher
    size = world.size
    if not (0 <= world.rank < size and 0 <= world.local_rank < world.local_size <= size):
        yield (
            f"{launcher} says rank {world.rank} of {size}, and {world.local_rank} of {world.local_size} on this host, "
            "which is impossible"
        )
    if (launcher != "single" or not alone) and slurm.number(env, slurm.COMPONENTS) > 1:
        yield "this is a heterogeneous Slurm job, but a run uses only one component; submit one job of equal nodes"
    for name in OTHERS.get(launcher, ()):
        count = slurm.number(env, name)
        if count > size:
            launch = f"{launcher} started {size} processes"
            if launcher == "single":
                launch = "no launcher started this process"
            yield (
                f"{launch}, but {name}={count}: use one of srun, mpirun and torchrun, or clear the variables of another launch that "
                f"have leaked into this process's environment (env -u {name} ...)"
            )
    tasks = max(slurm.number(env, slurm.TASKS), slurm.number(env, slurm.TASKS_OF_STEP))
    if not alone and size == 1 and launcher in ("single", *OF_MPI) and slurm.JOB in env and tasks > 1:
        yield (
            f"this Slurm job has {tasks} tasks ({slurm.TASKS}), but this process was started alone, without srun or by an mpirun "
            f"of one process; put srun before the command, or env -u {slurm.TASKS} to train on one process"
        )


def _values(launcher: str, env: Env, kind: type, *names: str) -> Any:
    """The values of these variables, each converted to ``kind``."""
    try:
        return [kind(env[name]) for name in names]
    except KeyError as missing:
        text = f"{launcher} started this process, but {missing.args[0]} is missing from its environment"
    except ValueError as error:
        text = f"{launcher} started this process, but its environment is invalid: {error}"
    raise ConfigError(text)


def lost_code(launcher: str, job: OwnJob, env: Env = os.environ) -> int:
    """Exit code of the other ranks if one is killed.

    In a job, the code asks for a requeue, because the scheduler may not know that a node is down. If torchrun's agent can restart the
    ranks, the code is another one, since the agent does not restart them after a request for a requeue.
    """
    agent_restarts = slurm.number(env, "TORCHELASTIC_RESTART_COUNT") < slurm.number(env, "TORCHELASTIC_MAX_RESTARTS")
    if job.id and launcher != "local" and not agent_restarts:
        return ExitCode.REQUEUE
    return ExitCode.FAILED
