"""What ``hpclm doctor`` shows of one process."""

import os
import platform
import re
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hpclm.distributed import bootstrap, network
from hpclm.errors import ConfigError
from hpclm.node import affinity, environment, facts, python

VARIABLES = re.compile(
    r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|OMPI_COMM_WORLD_(LOCAL_)?(RANK|SIZE)|PMI_(RANK|SIZE)|SLURMD_NODENAME"
    r"|SLURM_(CONF|RESTART_COUNT|NTASKS|(PROC|LOCAL|NODE)ID|CPUS_ON_NODE|CPUS_PER_TASK|GPUS_ON_NODE)"
    r"|SLURM_JOB_(ID|PARTITION|NODELIST)|SLURM_STEP_(ID|NUM_TASKS|NUM_NODES|NODELIST|TASKS_PER_NODE)"
    r"|(CUDA|NVIDIA)_VISIBLE_DEVICES|CUDA_HOME|OMP_(NUM_THREADS|PROC_BIND|PLACES)|(NCCL|GLOO)_SOCKET_IFNAME"
    r"|NCCL_(DEBUG|IB_DISABLE|IB_HCA|NET|P2P_DISABLE|SHM_DISABLE)|TORCH_(EXTENSIONS_DIR|CUDA_ARCH_LIST)"
    r"|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|(APPTAINER|SINGULARITY)_NAME"
)
"""The only variables that are shown: none of their values can be a secret."""


def collect(env: Mapping[str, str] = os.environ) -> dict[str, dict[str, Any]]:
    """Sections of names and values; the slow questions are asked at the same time."""
    with ThreadPoolExecutor(8) as pool:
        torch, collected = (pool.submit(python.ask, code, env) for code in (facts.TORCH, facts.COLLECT_ENV))
        programs = {
            "mpirun": pool.submit(facts.ask_program, "mpirun", "--version"),
            "sbatch": pool.submit(facts.ask_program, "sbatch", "--version"),
            "controller": pool.submit(facts.ask_program, "scontrol", "ping"),
        }
        for library, code in (("mpi4py", facts.MPI), ("apex", facts.APEX)):
            if facts.version(library):
                programs[library] = pool.submit(python.ask, code, env)
        launcher = detect_launcher(env)
        chosen = env.get("GLOO_SOCKET_IFNAME") or env.get("NCCL_SOCKET_IFNAME")
        return {
            "process": {"host": socket.gethostname(), "system": platform.release(), "pid": os.getpid(), **launcher},
            "software": facts.software(),
            "torch": torch.result(),
            "collect_env": collected.result(),
            "machine": {
                **facts.machine(),
                "bound": affinity.bound(os.sched_getaffinity(0), env),
                "threads": affinity.threads(launcher.get("local_size", 1), env),
                "home": facts.disk(Path(env.get("HOME", "/"))),
                "folder": facts.disk(Path.cwd()),
            },
            "network": {**network.addresses(), "to rank 0": chosen or interface_to_rank_0(env)},
            "programs": {name: answer.result() for name, answer in programs.items()},
            "variables": {name: env[name] for name in sorted(env) if VARIABLES.fullmatch(name)},
            "settings": {"site file": str(environment.site_file(env) or "none")},
        }


def detect_launcher(env: Mapping[str, str]) -> dict[str, Any]:
    """The launcher and rank of this process, as its environment variables give them."""
    try:
        world = bootstrap.detect(env, alone=False)
        return {name: getattr(world, name) for name in ("launcher", "rank", "size", "local_rank", "local_size")}
    except ConfigError as error:
        return {"error": str(error)}


def interface_to_rank_0(env: Mapping[str, str]) -> str | None:
    """The interface that leads to rank 0's host; None if no launcher names that host."""
    try:
        first = next(iter(bootstrap.detect(env).hosts), "") or env.get("MASTER_ADDR", "")
    except ConfigError:
        return None
    if not first or first == socket.gethostname():
        return "lo" if first else None
    return network.interface_of(network.address_towards(first))
