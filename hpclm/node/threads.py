"""The number of threads of each process on a machine, and settings to make before PyTorch is loaded."""

import os
import resource
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from hpclm.node import slurm

SYS = Path("/sys")
GROUPS = Path("/proc/self/cgroup")
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that make an OpenMP runtime bind threads to cores."""


def per_process(local_size: int, env: Mapping[str, str] = os.environ, system: Path = SYS) -> int:
    """The number of threads for this process, one of ``local_size`` on its host: OMP_NUM_THREADS, or its share of the physical cores.

    Set OMP_NUM_THREADS to it before PyTorch is loaded, or call torch.set_num_threads afterwards.
    """
    chosen = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if chosen.isdigit() and int(chosen):
        return int(chosen)
    allowed = os.sched_getaffinity(0)
    cores = min(physical(allowed, system), quota(system))
    of_task = slurm.cores_per_task(env)
    if of_task:
        share = min(of_task, cores)
    elif bound(allowed, env):  # a launcher that binds to sockets gives several processes the same cores
        share = min(cores, (os.cpu_count() or 1) // local_size)
    else:
        share = cores // local_size
    return max(1, share)


def bound(allowed: Collection[int], env: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher bound this process to fewer cores than the job has on this host.

    Only srun and MPI's launchers bind. Under any other launcher, all processes share the cores that are allowed.
    """
    if not any(name in env for name in (slurm.STEP, "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")):
        return False
    if "TORCHELASTIC_RUN_ID" in env:  # torchrun is the bound process of the step, and started this one
        return False
    machine = os.cpu_count() or 1
    return len(allowed) < min(slurm.cores_on_node(env) or machine, machine)


def physical(cores: Collection[int], system: Path = SYS) -> int:
    """The number of physical cores that the logical ``cores`` belong to."""
    siblings = set()
    for core in cores:
        try:
            siblings.add((system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(core))
    return len(siblings)


def usable() -> int:
    """The number of cores that this process may use: its allowed cores, or the CPU quota of its cgroup if that is smaller."""
    return min(len(os.sched_getaffinity(0)), quota())


def quota(system: Path = SYS, groups: Path = GROUPS) -> int:
    """The CPU quota of this process's cgroups (version 2) in whole cores, at least 1; sys.maxsize without a quota."""
    cores = sys.maxsize
    with suppress(OSError, StopIteration):
        name = next(line[3:] for line in groups.read_text().splitlines() if line.startswith("0::"))
        folder = system / "fs/cgroup" / name.lstrip("/")
        for level in (folder, *folder.parents):  # parent groups limit it too; a container sees only the root
            with suppress(OSError, ValueError):  # the root has no file, and "max" is not a number
                time, period = (level / "cpu.max").read_text().split()
                cores = min(cores, int(time) // int(period))
    return max(1, cores)


def available(env: Mapping[str, str] = os.environ) -> int:
    """The number of cores of this machine that the processes of the job may use, even if this process is bound to fewer."""

    def ask() -> None:  # in a separate thread, because it unbinds the thread that runs it
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        allowed.update(os.sched_getaffinity(0))

    allowed = set[int]()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return min(len(allowed), slurm.cores_on_node(env) or len(allowed))


def set_openmp() -> None:
    """Let idle OpenMP threads sleep, unless the user chose otherwise, and let only the launcher bind processes to cores.

    Call it before PyTorch is loaded. Spinning threads that share their core with another process make a step ten times as slow.
    An OpenMP runtime that binds threads binds the main threads of all processes of a node, and all their children, to the same core.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in BINDING:
        os.environ.pop(name, None)


def prepare() -> None:
    """Set up OpenMP, and raise soft resource limits, which may come from a login shell, to the hard limits."""
    set_openmp()
    for name in ("CPU", "FSIZE", "NOFILE", "NPROC", "AS", "DATA", "RSS", "MEMLOCK"):
        limit = getattr(resource, f"RLIMIT_{name}")
        hard = soft = resource.getrlimit(limit)[1]
        if name == "CPU" and hard != resource.RLIM_INFINITY:
            soft -= hard // 10  # SIGXCPU comes at the soft limit, SIGKILL at the hard one
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (soft, hard))
