"""What one process really has, for ``hpclm doctor``: collected, not judged."""

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path
from typing import Any

from hpclm import __version__
from hpclm.cluster import bootstrap, interfaces, placement
from hpclm.cluster.health import facts, probes, stale
from hpclm.errors import ConfigError

LIBRARIES = ("deepspeed", "fairscale", "apex", "mpi4py", "submitit", "numpy", "safetensors", "tokenizers")

# The only variables that are shown: a launcher's, and settings of the libraries. No value here can be a secret.
VARIABLES = {
    "launcher": [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "HPCLM_RANK",
        "HPCLM_WORLD_SIZE",
        "HPCLM_LOCAL_RANK",
        "HPCLM_LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "SLURM_CONF",
        "SLURM_CLUSTER_NAME",
        "SLURM_JOB_ID",
        "SLURM_JOB_PARTITION",
        "SLURM_JOB_NODELIST",
        "SLURM_RESTART_COUNT",
        "SLURM_NTASKS",
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_NODES",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURMD_NODENAME",
        "SLURM_CPUS_ON_NODE",
        "SLURM_CPUS_PER_TASK",
        "SLURM_GPUS_ON_NODE",
    ],
    "libraries": [
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "CUDA_HOME",
        "OMP_NUM_THREADS",
        "OMP_PROC_BIND",
        "OMP_PLACES",
        "KMP_AFFINITY",
        "GOMP_CPU_AFFINITY",
        "MKL_NUM_THREADS",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "NCCL_DEBUG",
        "NCCL_IB_DISABLE",
        "NCCL_IB_HCA",
        "NCCL_NET",
        "NCCL_P2P_DISABLE",
        "NCCL_SHM_DISABLE",
        "TORCH_EXTENSIONS_DIR",
        "TORCH_CUDA_ARCH_LIST",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "APPTAINER_NAME",
        "SINGULARITY_NAME",
    ],
}


def collect(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Everything; the slow questions are asked at the same time."""
    with ThreadPoolExecutor(8) as pool:
        torch = pool.submit(probes.python, probes.TORCH, env)
        mpi = pool.submit(probes.python, probes.MPI, env) if util.find_spec("mpi4py") else None
        apex = pool.submit(probes.python, probes.APEX, env) if nvidia_apex() else None
        mpirun = pool.submit(probes.program, "mpirun", "--version")
        sbatch = pool.submit(probes.program, "sbatch", "--version")
        control = pool.submit(probes.program, "scontrol", "ping")
        return {
            "host": {
                "name": socket.gethostname(),
                "system": f"{platform.system()} {platform.release()}",
                "pid": os.getpid(),
            },
            "launcher": launcher(env),
            "software": software(),
            "machine": machine(env),
            "network": network(env),
            "variables": {kind: shown(names, env) for kind, names in VARIABLES.items()},
            "site": None,
            "locks": [asdict(lock) for lock in stale.locks(env)],
            "torch": torch.result() | {"driver": facts.driver()},
            "apex": apex.result() if apex else None,
            "mpi": {"mpi4py": mpi.result() if mpi else None, "mpirun": mpirun.result()},
            "slurm": {"sbatch": sbatch.result(), "controller": control.result()},
        }


def launcher(env: Mapping[str, str]) -> dict[str, Any]:
    """Who started this process, as hpclm reads its variables."""
    try:
        return asdict(bootstrap.detect(env, alone=False)) | {"launch": None}  # which admits to the run
    except ConfigError as error:
        return {"error": str(error)}


def software() -> dict[str, str | None]:
    """Installed versions; None for what is absent."""
    found: dict[str, str | None] = {
        "hpclm": __version__,
        "python": platform.python_version(),
        "interpreter": sys.executable,
    }
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def nvidia_apex() -> bool:
    """Whether an installed apex is NVIDIA's; the package of that name on PyPI is something else."""
    spec = util.find_spec("apex")  # finds, does not import
    return bool(spec and any((Path(place) / "optimizers").is_dir() for place in spec.submodule_search_locations or ()))


def machine(env: Mapping[str, str]) -> dict[str, Any]:
    """Memory, cores and limits."""
    allowed = os.sched_getaffinity(0)
    local_size = launcher(env).get("local_size", 1)
    return {
        "threads": placement.threads(local_size, env),
        "memory_free": facts.memory_free(),
        "cores": os.cpu_count(),
        "allowed": placement.counted(allowed),
        "physical": placement.physical(allowed),
        "bound": placement.bound(allowed, env),
        "numa": [placement.counted(cores) for cores in placement.numa()],
        "shm": facts.shared_memory(),
        "open_files": limit(resource.RLIMIT_NOFILE),
        "locked_memory": limit(resource.RLIMIT_MEMLOCK),
        "home_free": free(Path(env.get("HOME", "/"))),
        "folder_free": free(Path.cwd()),
        "gpu_files": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
    }


def limit(which: int) -> int | None:
    """The soft limit of a resource; None when there is none."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def free(folder: Path) -> int | None:
    """Free bytes where ``folder`` is."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def shown(names: list[str], env: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that are set."""
    return {name: env[name] for name in names if name in env}


def network(env: Mapping[str, str]) -> dict[str, Any]:
    """Interfaces with their addresses, and the one that traffic between nodes would take."""
    told = env.get("GLOO_SOCKET_IFNAME") or env.get("NCCL_SOCKET_IFNAME")
    return {"interfaces": interfaces.addresses(), "told": bool(told), "chosen": told or towards_first(env)}


def towards_first(env: Mapping[str, str]) -> str | None:
    """The interface whose address this host uses to reach rank 0's; None where no launcher says which that is."""
    try:
        first = bootstrap.detect(env).first_host or env.get("MASTER_ADDR", "")
    except ConfigError:
        return None
    if not first or first == socket.gethostname():
        return "lo" if first else None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((first, 9))  # finds the way; sends nothing
        return interfaces.of(probe.getsockname()[0])
    return None
