"""The variables that Slurm sets for the processes of a job.

Below launch/, no other file reads these variables. Only ``hpclm.launch.schedulers`` calls Slurm's commands.
"""

import os
import re
import socket
from collections.abc import Iterable, Mapping

from hpclm.node.job import OwnJob

Env = Mapping[str, str]
JOB = "SLURM_JOB_ID"
STEP = "SLURM_STEP_ID"
"""srun sets it, and a batch script lacks it. Under mpirun, SLURM_PROCID belongs to the daemon that started the rank."""
NODES = "SLURM_JOB_NUM_NODES"
TASKS_OF_A_NODE = "SLURM_NTASKS_PER_NODE"
NODE_NAME = "SLURMD_NODENAME"
CORES_PER_TASK = "SLURM_CPUS_PER_TASK"
FIRST_START = re.compile("SLURM_(NTASKS|NPROCS)")
"""Counts of a job's first start. After a requeue, the job may have other nodes."""
EXPORT_ALL = dict.fromkeys(("SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV"), "ALL")
"""Variables that give a step the environment of the process that starts it, whatever --export the job was submitted with."""
STEPS = "SLURM_STEP"
"""Prefix of the variables of a step."""
TASKS = "SLURM_NTASKS"
TASKS_OF_STEP = "SLURM_STEP_NUM_TASKS"
COMPONENTS = "SLURM_HET_SIZE"
NUMBERS_OF_RANK = ("SLURM_PROCID", TASKS_OF_STEP, "SLURM_LOCALID", "SLURM_NODEID")
"""Rank, number of ranks, local rank, and index of the node in the step."""
NODES_OF_STEP = "SLURM_STEP_NODELIST"
TASKS_OF_NODES = "SLURM_STEP_TASKS_PER_NODE"
NODE_OF_STEP = "SLURM_NODEID"
DISTRIBUTION = "SLURM_DISTRIBUTION"
"""Variable with srun's order of ranks on nodes; not set for the default, block by block."""
ADDRESSES = "SLURM_HPCLM_ADDRESSES"
"""Variable with all addresses of the job's first node. The job's script sets it: the node's name may not resolve to any of them."""
GPUS = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")
"""Variables of a job that has GPUs."""
VARIABLES = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC)_\w+|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
)
"""Variables that Slurm sets for the processes that it starts, or that users set for its commands."""
CLUSTERS = "SLURM_CLUSTERS"
"""Variable with the clusters that Slurm's commands ask."""
CLUSTERS_OF_SBATCH = "SBATCH_CLUSTERS"
"""Variable with the cluster that sbatch submits to."""
TOKEN = "SLURM_JWT"
"""Variable with the token that Slurm's commands log in with."""
FINDS_CLUSTER = ("SLURM_CONF", TOKEN)
"""Variables that Slurm's commands need to find a cluster and to log in."""
OPTIONS = {
    f"SBATCH_{option.upper()}": option
    for option in ("account", "clusters", "constraint", "partition", "qos", "reservation", "wckey")
}
"""Variables that a user may set for all jobs, and their options; a job's own settings override them."""


def own_job(env: Env = os.environ) -> OwnJob | None:
    """The job of a process with these variables; None outside Slurm."""
    if JOB not in env:
        return None
    array = env.get("SLURM_ARRAY_JOB_ID")
    task = env.get("SLURM_ARRAY_TASK_ID", "0")
    ends = env.get("SLURM_JOB_END_TIME", "")
    hosts = tuple(expand(env.get("SLURM_JOB_NODELIST", "")))
    host = socket.gethostname()
    node = env.get(NODE_NAME, "")
    if "MPI_LOCALRANKID" in env:  # MPICH passes the variables of its first node to all ranks
        node = host.partition(".")[0]
    return OwnJob(
        scheduler="Slurm",
        id=f"{array}_{task}" if array else env[JOB],  # the array's own number means all tasks
        restart=number(env, "SLURM_RESTART_COUNT"),
        array_task=task if array else "",
        hosts=hosts,
        node=node if node and node in (hosts or [node]) else host,
        deadline=float(ends) if ends.isascii() and ends.isdigit() else None,
    )


def start_of_job(env: Env = os.environ) -> str:
    """A name for the current start of the job, for names of folders; empty outside Slurm."""
    return f"{env[JOB]}-{env.get('SLURM_RESTART_COUNT', '0')}" if JOB in env else ""


def run_id(env: Env) -> str:
    """A name for the current start of the step."""
    # a requeued job keeps its id: without the restart count, ranks that outlive a dead slurmd could join the next attempt
    return ".".join([env[JOB], env[STEP], env.get("SLURM_RESTART_COUNT", "0")])


def addresses(env: Env = os.environ) -> list[str]:
    """The IPv4 addresses of the job's first node; empty if its script has not set them."""
    return [address for address in env.get(ADDRESSES, "").split() if ":" not in address]


def cores_per_task(env: Env) -> int:
    """Cores per task that the job asked for; 0 without a request."""
    return number(env, CORES_PER_TASK)


def cores_on_node(env: Env) -> int:
    """The cores that the job has on this node; 0 outside Slurm."""
    return number(env, "SLURM_CPUS_ON_NODE")


def asked_gpus(env: Env) -> str:
    """NAME=VALUE of a variable that shows that this job asked for GPUs; empty without one."""
    return next((f"{name}={env[name]}" for name in GPUS if env.get(name) and JOB in env), "")


def kept_for_sbatch(options: Iterable[str], env: Env) -> set[str]:
    """The variables of Slurm that sbatch must see when it submits a job that sets ``options`` itself.

    SBATCH_* variables and SLURM_CLUSTERS override a script's options.
    """
    options = set(options)
    kept = set(FINDS_CLUSTER)
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
