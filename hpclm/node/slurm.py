"""The variables that Slurm sets for the processes of a job: which job it is, what it may use, and what others must not inherit.

No other file below launch/ reads them; Slurm's commands are called in ``hpclm.launch.schedulers`` only.
"""

import os
import re
import socket
from collections.abc import Iterable, Mapping

from hpclm.node.job import OwnJob

Env = Mapping[str, str]
JOB, STEP = "SLURM_JOB_ID", "SLURM_STEP_ID"
"""STEP, unlike SLURM_PROCID, is set by srun and not in a batch script; under mpirun SLURM_PROCID is that of the daemon which
started the rank."""
NODES, TASKS_OF_A_NODE, NODE_NAME = "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE", "SLURMD_NODENAME"
CORES_PER_TASK = "SLURM_CPUS_PER_TASK"
FIRST_START = re.compile("SLURM_(NTASKS|NPROCS)")
"""Counts of a job's first start; one that starts again may have other nodes."""
EXPORT_ALL = dict.fromkeys(("SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV"), "ALL")
"""Variables by which a step gets the environment of what starts it, whatever the job's own --export says."""
STEPS = "SLURM_STEP"
"""How the variables of a step begin."""
TASKS, TASKS_OF_STEP, COMPONENTS = "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_HET_SIZE"
NUMBERS_OF_RANK = ("SLURM_PROCID", TASKS_OF_STEP, "SLURM_LOCALID", "SLURM_NODEID")
"""Rank, ranks, local rank and number of the node among those of the step."""
NODES_OF_STEP, TASKS_OF_NODES, NODE_OF_STEP = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"
DISTRIBUTION = "SLURM_DISTRIBUTION"
"""How srun deals ranks out to nodes; not set for its default, block by block."""
ADDRESSES = "SLURM_HPCLM_ADDRESSES"
"""All addresses of the job's first node, set by the job's script: the node's name may lead to none of them."""
GPUS = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")
"""Variables of a job that has GPUs."""
VARIABLES = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC)_\w+|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
)
"""Set by Slurm for the processes that it starts, and by its users for its commands."""
CLUSTERS, CLUSTERS_OF_SBATCH = "SLURM_CLUSTERS", "SBATCH_CLUSTERS"
"""Variables that name the clusters that the commands ask, and the one that sbatch submits to."""
TOKEN = "SLURM_JWT"
"""Variable with a token by which the commands log in."""
FINDS_CLUSTER = ("SLURM_CONF", TOKEN)
"""Variables by which all its commands find a cluster and log in to it."""
OPTIONS = {
    f"SBATCH_{option.upper()}": option
    for option in ("account", "clusters", "constraint", "partition", "qos", "reservation", "wckey")
}
"""Variables that a user may set for all jobs; they count unless the job's own settings give the option."""


def own_job(env: Env = os.environ) -> OwnJob | None:
    """The job of a process with these variables; None outside Slurm."""
    if JOB not in env:
        return None
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID", "0")
    ends = env.get("SLURM_JOB_END_TIME", "")
    hosts = tuple(expand(env.get("SLURM_JOB_NODELIST", "")))
    # MPICH hands the variables of its first node on to all ranks
    host = socket.gethostname()
    node = host.partition(".")[0] if "MPI_LOCALRANKID" in env else env.get(NODE_NAME, "")
    return OwnJob(
        scheduler="Slurm",
        id=f"{array}_{task}" if array else env[JOB],  # the array's own number means all tasks
        restart=number(env, "SLURM_RESTART_COUNT"),
        array_task=task if array else "",
        hosts=hosts,
        node=node if node and (not hosts or node in hosts) else host,
        deadline=float(ends) if ends.isascii() and ends.isdigit() else None,
    )


def start_of_job(env: Env = os.environ) -> str:
    """A name for the present start of the job, as a part of folder names; empty outside Slurm."""
    return f"{env[JOB]}-{env.get('SLURM_RESTART_COUNT', '0')}" if JOB in env else ""


def run_id(env: Env) -> str:
    """A name for the present start of the step."""
    # a requeued job keeps its number: without the count, ranks that outlive a dead slurmd could join the next attempt
    return ".".join([env[JOB], env[STEP], env.get("SLURM_RESTART_COUNT", "0")])


def addresses(env: Env = os.environ) -> list[str]:
    """The IPv4 addresses of the job's first node, if its script says them."""
    return [address for address in env.get(ADDRESSES, "").split() if ":" not in address]


def cores_per_task(env: Env) -> int:
    """The cores that the job asked for each of its tasks; 0 if it did not."""
    return number(env, CORES_PER_TASK)


def cores_on_node(env: Env) -> int:
    """The cores that the job has on this node; 0 outside Slurm."""
    return number(env, "SLURM_CPUS_ON_NODE")


def asked_gpus(env: Env) -> str:
    """The variable that says that this job asked for GPUs, as NAME=VALUE; empty if it did not."""
    return next((f"{name}={env[name]}" for name in GPUS if env.get(name) and JOB in env), "")


def kept_for_sbatch(options: Iterable[str], env: Env) -> set[str]:
    """The variables of Slurm that sbatch must see when it submits a job that sets ``options`` itself.

    SBATCH_* variables and SLURM_CLUSTERS override a script's options.
    """
    options, kept = set(options), set(FINDS_CLUSTER)
    if JOB not in env:
        kept |= {name for name, option in OPTIONS.items() if option not in options}
        kept |= {name for name in env if name.endswith("_VISIBLE_DEVICES")}
    if "clusters" not in options and not (CLUSTERS_OF_SBATCH in kept and env.get(CLUSTERS_OF_SBATCH)):
        kept.add(CLUSTERS)
    return kept


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


def number(env: Env, name: str) -> int:
    """The number that a variable holds; 0 without one."""
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _span(text: str) -> list[str]:
    """``07-09`` -> 07, 08, 09; ``12`` -> 12."""
    first, _, last = text.partition("-")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
