"""Everything that ``hpclm doctor`` shows about one process: collected here, judged in ``diagnosis``."""

import os
import platform
import re
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import util
from pathlib import Path
from typing import Any

from hpclm.distributed import bootstrap
from hpclm.distributed import network as addresses
from hpclm.errors import ConfigError
from hpclm.node import affinity, environment, facts, python

# The only variables that are shown: a launcher's, and settings of the libraries. No value here can be a secret.
VARIABLES = {
    "launcher": re.compile(
        r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|OMPI_COMM_WORLD_(LOCAL_)?(RANK|SIZE)|PMI_(RANK|SIZE)"
        r"|MPI_(LOCALRANKID|LOCALNRANKS)|SLURMD_NODENAME|SLURM_(CONF|CLUSTER_NAME|RESTART_COUNT|NTASKS|PROCID|LOCALID|NODEID)"
        r"|SLURM_JOB_(ID|PARTITION|NODELIST)|SLURM_STEP_(ID|NUM_TASKS|NUM_NODES|NODELIST|TASKS_PER_NODE)"
        r"|SLURM_(CPUS_ON_NODE|CPUS_PER_TASK|GPUS_ON_NODE)"
    ),
    "libraries": re.compile(
        r"(CUDA|NVIDIA)_VISIBLE_DEVICES|CUDA_HOME|OMP_(NUM_THREADS|PROC_BIND|PLACES)|(KMP|GOMP_CPU)_AFFINITY|MKL_NUM_THREADS"
        r"|(NCCL|GLOO)_SOCKET_IFNAME|NCCL_(DEBUG|IB_DISABLE|IB_HCA|NET|P2P_DISABLE|SHM_DISABLE)|TORCH_(EXTENSIONS_DIR|CUDA_ARCH_LIST)"
        r"|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|(APPTAINER|SINGULARITY)_NAME"
    ),
}


def collect(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Everything; the slow questions are asked at the same time."""
    with ThreadPoolExecutor(8) as pool:
        torch = pool.submit(python.ask, facts.TORCH, env)
        mpi = pool.submit(python.ask, facts.MPI, env) if util.find_spec("mpi4py") else None
        apex = pool.submit(python.ask, facts.APEX, env) if facts.has_nvidia_apex() else None
        mpirun = pool.submit(facts.ask_program, "mpirun", "--version")
        sbatch = pool.submit(facts.ask_program, "sbatch", "--version")
        controller = pool.submit(facts.ask_program, "scontrol", "ping")
        world = launcher(env)
        system = f"{platform.system()} {platform.release()}"
        return {
            "host": {"name": socket.gethostname(), "system": system, "pid": os.getpid()},
            "launcher": world,
            "software": facts.software(),
            "machine": {
                **facts.machine(),
                "threads": affinity.threads(world.get("local_size", 1), env),
                "bound": affinity.bound(os.sched_getaffinity(0), env),
                "home": facts.disk(Path(env.get("HOME", "/"))),
                "folder": facts.disk(Path.cwd()),
            },
            "network": network(env),
            "variables": {
                kind: {n: env[n] for n in sorted(env) if shown.fullmatch(n)} for kind, shown in VARIABLES.items()
            },
            "site": str(environment.site_file(env) or "") or None,
            "torch": torch.result(),
            "apex": apex.result() if apex else None,
            "mpi": {"mpi4py": mpi.result() if mpi else None, "mpirun": mpirun.result()},
            "slurm": {"sbatch": sbatch.result(), "controller": controller.result()},
        }


def launcher(env: Mapping[str, str]) -> dict[str, Any]:
    """The launcher and rank of this process, as its environment variables give them."""
    try:
        return asdict(bootstrap.detect(env, alone=False))
    except ConfigError as error:
        return {"error": str(error)}


def network(env: Mapping[str, str]) -> dict[str, Any]:
    """Interfaces with their addresses, and the one that traffic between nodes would take."""
    told = env.get("GLOO_SOCKET_IFNAME") or env.get("NCCL_SOCKET_IFNAME")
    chosen = told or interface_to_rank_0(env)
    return {"interfaces": addresses.addresses(), "told": bool(told), "chosen": chosen}


def interface_to_rank_0(env: Mapping[str, str]) -> str | None:
    """The interface that leads to rank 0's host; None if no launcher names that host."""
    try:
        first = bootstrap.detect(env).first_host or env.get("MASTER_ADDR", "")
    except ConfigError:
        return None
    if not first or first == socket.gethostname():
        return "lo" if first else None
    return addresses.interface_of(addresses.address_towards(first))
