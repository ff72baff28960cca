"""Which rank this process is, from the environment variables of its launcher.

Variables leak: a job submitted from inside a step, or srun under mpirun, inherits those of the outer launcher.
Contradictions are refused here, before anything waits for processes that will never come.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpclm.distributed.signed import SECRET, SIGNED
from hpclm.errors import REQUEUE, ConfigError

Env = Mapping[str, str]


@dataclass(frozen=True)
class World:
    """This process among all processes of the run."""

    launcher: str
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    run_id: str = ""
    """Identifies this start of the run: the same for all ranks, different at the next start."""
    hosts: tuple[str, ...] = ()
    """The host of each rank, if the launcher names them."""
    master: str = ""
    """The host of torchrun's store."""
    secret: str = field(default="", repr=False)
    """With which the ranks sign what they write into the store; empty if the launcher gave them none."""
    began: float = field(default_factory=time.time, compare=False)
    """When this process began to train, in seconds since 1970: for a command, when the process started."""


def detect(env: Env = os.environ, alone: bool = True) -> World:
    """The world of this process; ConfigError if the launcher's variables contradict each other.

    ``alone=False``: refuse a process in a Slurm job of several tasks that no launcher started, since its peers are
    missing.
    """
    launched = (read for variable, read in LAUNCHERS if variable in env)
    world = replace(next(launched, lambda _: World("single", 0, 1))(env), secret=env.get(SECRET, ""))
    if problems := list(_contradictions(world, env, alone)):
        raise ConfigError(problems)
    return world


MARKERS = {
    "Slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    "Open MPI": ("PMIX_NAMESPACE",),
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "local": ("TORCHELASTIC_RUN_ID",),
}
"""Variables that identify the ranks of one launch and their children."""


def marker(world: World, env: Env = os.environ) -> dict[str, str]:
    """Variables and values that identify processes of this launch; empty if there are none."""
    names = MARKERS.get(world.launcher, ())
    return {name: env[name] for name in names} if all(env.get(name) for name in names) else {}


def _torchrun(env: Env) -> World:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = _values("torchrun", env, int, *names)
    run_id = f"{env['TORCHELASTIC_RUN_ID']}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    launcher = "local" if env.get("HPCLM_LAUNCHER") == "local" else "torchrun"  # hpclm's own, on one machine
    return World(launcher, rank, size, local_rank, local_size, run_id, master=env.get("MASTER_ADDR", ""))


def _open_mpi(env: Env) -> World:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return World("Open MPI", *_values("Open MPI", env, int, *(f"OMPI_COMM_WORLD_{name}" for name in names)))


def _hydra(env: Env) -> World:
    return World("MPI", *_values("MPI", env, int, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _slurm(env: Env) -> World:
    numbers = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
    # of the step, not of the job: srun may use fewer nodes, and SLURM_NTASKS is stale after a requeue with other nodes
    texts = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID")
    rank, size, local_rank, node = _values("Slurm", env, int, *numbers)
    nodes, tasks, job = _values("Slurm", env, str, *texts)
    counts, names = tasks_per_node(tasks), expand(nodes)
    if len(names) != len(counts) or node >= len(counts):
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodes}, SLURM_STEP_TASKS_PER_NODE={tasks} and SLURM_NODEID={node} contradict each other"
        )
    # a requeued job keeps its number: without the count, ranks that outlive a dead slurmd could join the next attempt
    run_id = ".".join([job, env["SLURM_STEP_ID"], env.get("SLURM_RESTART_COUNT", "0")])
    hosts = tuple(name for name, count in zip(names, counts, strict=True) for _ in range(count))
    return World("Slurm", rank, size, local_rank, counts[node], run_id, hosts)


# The first row whose variable is set wins. Launchers nest, so the innermost come first: torchrun and mpirun run inside
# Slurm jobs. SLURM_STEP_ID, unlike SLURM_PROCID, is set by srun and not in a batch script; under mpirun
# SLURM_PROCID is that of the daemon which started the rank.
LAUNCHERS: tuple[tuple[str, Callable[[Env], World]], ...] = (
    ("TORCHELASTIC_RUN_ID", _torchrun),
    ("OMPI_COMM_WORLD_RANK", _open_mpi),
    ("MPI_LOCALRANKID", _hydra),  # MPICH and Intel MPI
    ("SLURM_STEP_ID", _slurm),
)


OF_MPI = ("Open MPI", "MPI")
"""Launchers that use MPI."""


OTHERS = {
    "Slurm": ("SLURM_NTASKS",),
    **dict.fromkeys(OF_MPI, ("SLURM_STEP_NUM_TASKS",)),  # of mpirun's daemons there are no more than of its ranks
    **dict.fromkeys(("torchrun", "local"), ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")),
    "single": ("WORLD_SIZE", "PMI_SIZE"),
}
"""Variables of other launches: if one counts more processes than this launch has, it has leaked into this environment."""


def _contradictions(world: World, env: Env, alone: bool) -> Iterator[str]:
    launcher, size = world.launcher, world.size
    if not (0 <= world.rank < size and 0 <= world.local_rank < world.local_size <= size):
        yield (
            f"{launcher} says rank {world.rank} of {size}, and {world.local_rank} of {world.local_size} on this host, "
            "which is impossible"
        )
    if (launcher != "single" or not alone) and _number(env, "SLURM_HET_SIZE") > 1:
        yield "this is a heterogeneous Slurm job, of which the run would use one component; submit one job of equal nodes"
    if size > 1 and launcher in ("Slurm", "torchrun") and SIGNED in env and not world.secret:
        yield (
            f"the job's script made a secret for its ranks, with which they sign what they tell one another, but this rank has no "
            f"{SECRET}: start the ranks with srun --export=ALL, and pass the variables HPCLM_* into a container"
        )
    for name in OTHERS.get(launcher, ()):
        if (count := _number(env, name)) > size:
            launch = (
                "no launcher started this process" if launcher == "single" else f"{launcher} started {size} processes"
            )
            yield (
                f"{launch}, but {name}={count}: use one of srun, mpirun and torchrun, or clear the variables of another launch that "
                f"have leaked into this process's environment (env -u {name} ...)"
            )
    tasks = max(_number(env, "SLURM_NTASKS"), _number(env, "SLURM_STEP_NUM_TASKS"))
    if not alone and size == 1 and launcher in ("single", *OF_MPI) and "SLURM_JOB_ID" in env and tasks > 1:
        yield (
            f"this Slurm job has {tasks} tasks (SLURM_NTASKS), but this process was started alone, without srun or by an mpirun "
            "of one process; put srun before the command, or env -u SLURM_NTASKS to train on one process"
        )


def _values(launcher: str, env: Env, kind: type, *names: str) -> Any:  # as many as names
    try:
        return [kind(env[name]) for name in names]
    except KeyError as missing:
        text = f"{launcher} started this process, but {missing.args[0]} is missing from its environment"
    except ValueError as error:
        text = f"{launcher} started this process, but its environment is invalid: {error}"
    raise ConfigError(text)


def _number(env: Env, name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def lost_code(launcher: str, env: Env = os.environ) -> int:
    """Exit code of the other ranks if one is killed: Slurm can requeue the job, and may not know that a node is down.

    Not if torchrun's agent restarts the ranks, which it does not after an exit with 85.
    """
    restarts = _number(env, "TORCHELASTIC_RESTART_COUNT") < _number(env, "TORCHELASTIC_MAX_RESTARTS")
    return REQUEUE if job(env) and launcher != "local" and not restarts else 1


def job(env: Env = os.environ) -> dict[str, str | int]:
    """Slurm's number of the job this process is in (12_3 for an array's task) and how often it was restarted; or {}."""
    if "SLURM_JOB_ID" not in env:
        return {}
    array = env.get("SLURM_ARRAY_JOB_ID")
    number = f"{array}_{env.get('SLURM_ARRAY_TASK_ID', 0)}" if array else env["SLURM_JOB_ID"]
    return {"job_id": number, "restart": _number(env, "SLURM_RESTART_COUNT")}


def tasks_per_node(text: str) -> list[int]:
    """Slurm's ``4(x2),3`` -> [4, 4, 3]."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def expand(nodes: str) -> list[str]:
    """Slurm's node list, host by host: ``gpu[07-08,12]-ib,login1`` -> gpu07-ib, gpu08-ib, gpu12-ib, login1."""
    expanded = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodes):
        hosts = [""]
        for text, listed in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            ends = [text] if text else [number for span in listed.split(",") for number in _span(span)]
            hosts = [host + end for host in hosts for end in ends]
        expanded += hosts
    return expanded


def _span(text: str) -> list[str]:
    """``07-09`` -> 07, 08, 09; ``12`` -> 12."""
    first, _, last = text.partition("-")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
