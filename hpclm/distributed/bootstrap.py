"""Which rank this process is, from the environment variables of its launcher.

Variables leak: a job submitted from inside a step, or srun under mpirun, inherits those of the outer launcher.
Contradictions are refused here, before anything waits for processes that will never come.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpclm.distributed.signed import SECRET
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
    nodes: tuple[tuple[str, int], ...] = ()
    """Hosts and their numbers of ranks, in rank order, if the launcher provides them."""
    master: str = ""
    """The host of torchrun's store."""
    secret: str = field(default="", repr=False)
    """With which the ranks sign what they write into the store; empty if the launcher gave them none."""

    @property
    def first_host(self) -> str:
        """The host of rank 0; empty if unknown."""
        return self.nodes[0][0] if self.nodes else ""

    def host_of(self, rank: int) -> str:
        """The host of ``rank`` if hosts are filled one after another; empty if unknown."""
        for host, count in self.nodes:
            if rank < count:
                return host
            rank -= count
        return ""


def detect(env: Env = os.environ, alone: bool = True) -> World:
    """The world of this process; ConfigError if the launcher's variables contradict each other.

    ``alone=False``: refuse a process in a Slurm job of several tasks that no launcher started, since its peers are
    missing.
    """
    for variable, read in LAUNCHERS:
        if variable in env:
            world = replace(read(env), secret=env.get(SECRET, ""))
            break
    else:
        world = World("single", 0, 1)
    wrong = [*_nonsense(world), *_contradictions(world, env), *(() if alone else _peerless(world, env))]
    if wrong:
        raise ConfigError(wrong)
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
    rank, size, local_rank, local_size = _numbers("torchrun", env, *names)
    run_id = f"{env['TORCHELASTIC_RUN_ID']}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    launcher = "local" if env.get("HPCLM_LAUNCHER") == "local" else "torchrun"  # hpclm's own, on one machine
    return World(launcher, rank, size, local_rank, local_size, run_id, master=env.get("MASTER_ADDR", ""))


def _open_mpi(env: Env) -> World:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return World("Open MPI", *_numbers("Open MPI", env, *(f"OMPI_COMM_WORLD_{name}" for name in names)))


def _hydra(env: Env) -> World:
    return World("MPI", *_numbers("MPI", env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _slurm(env: Env) -> World:
    rank, size, local_rank, node = _numbers(
        "Slurm", env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"
    )
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID")
    nodes, tasks, job = (_variable("Slurm", env, name) for name in names)
    counts = tasks_per_node(tasks)
    if node >= len(counts):
        raise ConfigError(
            f"Slurm says that this is node {node} of SLURM_STEP_TASKS_PER_NODE={tasks}, which has {len(counts)}"
        )
    run_id = ".".join([job, env["SLURM_STEP_ID"], env.get("SLURM_RESTART_COUNT", "0")])
    hosts = expand(nodes)
    if len(hosts) != len(counts):
        raise ConfigError(f"SLURM_STEP_NODELIST={nodes} and SLURM_STEP_TASKS_PER_NODE={tasks} contradict each other")
    return World("Slurm", rank, size, local_rank, counts[node], run_id, tuple(zip(hosts, counts, strict=True)))


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


def _nonsense(world: World) -> Iterator[str]:
    if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size <= world.size):
        yield (
            f"{world.launcher} says rank {world.rank} of {world.size}, and {world.local_rank} of {world.local_size} on "
            f"this host, which is impossible"
        )


def _contradictions(world: World, env: Env) -> Iterator[str]:
    """Contradictions between the variables of two launchers."""
    tasks, nodes, promised = (_number(env, f"SLURM_{name}") for name in ("STEP_NUM_TASKS", "STEP_NUM_NODES", "NTASKS"))
    if world.launcher != "single":
        yield from _heterogeneous(env)
    if world.launcher == "Slurm" and promised is not None and promised != world.size:
        yield (
            f"SLURM_STEP_NUM_TASKS={world.size} but SLURM_NTASKS={promised}: another step's variables are in the environment "
            f"of this process (a job submitted from inside another?); start the processes with srun"
        )
    # mpirun starts one daemon a node as a separate step; anything else around it is another job's
    if world.launcher in OF_MPI and tasks and nodes and tasks > nodes and tasks != world.size:
        name = "OMPI_COMM_WORLD_SIZE" if world.launcher == "Open MPI" else "PMI_SIZE"
        yield (
            f"{name}={world.size} but SLURM_STEP_NUM_TASKS={tasks}: mpirun and srun both claim this process; start it with "
            f"one of them, and with srun clear the other's variables first (env -u OMPI_COMM_WORLD_RANK ...)"
        )
    outer = max(_number(env, name) or 1 for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if world.launcher in ("torchrun", "local") and outer > world.size:
        yield (
            f"torchrun says that there are {world.size} processes, and MPI {outer}: the variables of one have leaked into the "
            "other's processes; clear the wrong ones (env -u TORCHELASTIC_RUN_ID ...)"
        )
    pmix = _number(env, "PMIX_RANK")
    if world.launcher == "Open MPI" and pmix is not None and pmix != world.rank:
        yield (
            f"OMPI_COMM_WORLD_RANK={world.rank} but PMIX_RANK={pmix}: the variables of an mpirun around this launch have "
            f"leaked into it; clear them first (env -u OMPI_COMM_WORLD_RANK ...)"
        )
    if world.launcher == "single":
        for name in ("PMI_SIZE", "WORLD_SIZE"):
            size = _number(env, name)
            if size is not None and size > 1:
                yield (
                    f"{name}={size} says that there are more processes, but no launcher that hpclm knows started this one; "
                    f"use srun, mpirun or torchrun, or clear {name}"
                )


def _heterogeneous(env: Env) -> Iterator[str]:
    if (_number(env, "SLURM_HET_SIZE") or 1) > 1:
        yield "this is a heterogeneous Slurm job, of which the run would use one component; submit one job of equal nodes"


def _peerless(world: World, env: Env) -> Iterator[str]:
    if world.launcher == "single":
        yield from _heterogeneous(env)
    tasks = max(_number(env, "SLURM_NTASKS") or 1, _number(env, "SLURM_STEP_NUM_TASKS") or 1)
    if world.size == 1 and world.launcher in ("single", *OF_MPI) and "SLURM_JOB_ID" in env and tasks > 1:
        started = "without srun or mpirun" if world.launcher == "single" else "by an mpirun of one process"
        yield (
            f"this Slurm job has SLURM_NTASKS={tasks} tasks, but this process was started alone, {started}; "
            f"put srun before the command, or env -u SLURM_NTASKS to train on one process"
        )


def _numbers(launcher: str, env: Env, *names: str) -> Any:  # as many whole numbers as names
    try:
        return [int(_variable(launcher, env, name)) for name in names]
    except ValueError as error:
        raise ConfigError(f"{launcher} started this process, but its environment is invalid: {error}") from None


def _variable(launcher: str, env: Env, name: str) -> str:
    try:
        return env[name]
    except KeyError:
        raise ConfigError(f"{launcher} started this process, but {name} is missing from its environment") from None


def _number(env: Env, name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def restarts_left(env: Env = os.environ) -> bool:
    """Whether torchrun's agent restarts the ranks if one fails."""
    count, most = (_number(env, f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count is not None and most is not None and count < most


def lost_code(launcher: str, restarts: bool, env: Env = os.environ) -> int:
    """Exit code of the other ranks if one is killed: Slurm can requeue the job, and may not know that a node is down.

    ``restarts``: whether torchrun's agent restarts the ranks, which it does not after an exit with 85.
    """
    return REQUEUE if job(env) and launcher != "local" and not restarts else 1


def job(env: Env = os.environ) -> dict[str, str | int]:
    """Slurm's number of the job this process is in (12_3 for an array's task) and how often it was restarted; or {}."""
    if "SLURM_JOB_ID" not in env:
        return {}
    array = env.get("SLURM_ARRAY_JOB_ID")
    number = f"{array}_{env.get('SLURM_ARRAY_TASK_ID', 0)}" if array else env["SLURM_JOB_ID"]
    return {"job_id": number, "restart": _number(env, "SLURM_RESTART_COUNT") or 0}


def tasks_per_node(text: str) -> list[int]:
    """Slurm's ``4(x2),3`` -> [4, 4, 3]; ConfigError when it is something else."""
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of task counts")
    return [int(count) for count, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", text) for _ in range(int(times or 1))]


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
