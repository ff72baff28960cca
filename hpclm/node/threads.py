"""How many threads each of the processes that share a machine uses, and what every process sets for itself first."""

import os
import resource
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

SYS = Path("/sys")


def per_process(local_size: int, env: Mapping[str, str] = os.environ, system: Path = SYS) -> int:
    """Threads for this process, one of ``local_size`` on its host: OMP_NUM_THREADS if the user set it, otherwise its share of
    the physical cores.

    Set the number as OMP_NUM_THREADS before torch is loaded, or by torch.set_num_threads afterwards.
    """
    chosen = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if chosen.isdigit() and int(chosen):
        return int(chosen)
    allowed = os.sched_getaffinity(0)
    cores = physical(allowed, system)
    given = env.get("SLURM_CPUS_PER_TASK", "")
    if given.isdigit() and int(given):
        return max(1, min(int(given), cores))
    if not bound(allowed, env):
        return max(1, cores // local_size)
    # a launcher that binds to sockets gives several processes the same cores
    return max(1, min(cores, (os.cpu_count() or 1) // local_size))


def bound(allowed: Collection[int], env: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher bound this process to cores: fewer than the job has on this host.

    Only srun and MPI's launchers bind. Under any other launcher, all processes share the cores that are allowed.
    """
    if not any(name in env for name in ("SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")):
        return False
    if "TORCHELASTIC_RUN_ID" in env:  # started by one process of such a step
        return False
    job = env.get("SLURM_CPUS_ON_NODE", "")
    return len(allowed) < min(int(job) if job.isdigit() else os.cpu_count() or 1, os.cpu_count() or 1)


def physical(cores: Collection[int], system: Path = SYS) -> int:
    """How many physical cores the logical ``cores`` belong to."""
    siblings = set()
    for core in cores:
        try:
            siblings.add((system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(core))
    return len(siblings)


def prepare() -> None:
    """Let idle OpenMP threads sleep, unless the user chose otherwise, and raise the soft limit of open files to the hard one.

    Called before torch is loaded. Spinning threads that share their core with another process make a step ten times as slow;
    a blend keeps several files open for each of its datasets.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
