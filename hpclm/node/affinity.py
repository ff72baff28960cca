"""CPU affinity and threads: which cores a process runs on, how many threads it uses, how many files it may open.

Several processes share a machine. Each must use its own cores, near its GPU, or they compete for the same ones.
"""

import os
import resource
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from hpclm.terminal import ranges

SYS = Path("/sys")


def threads(local_size: int, env: Mapping[str, str] = os.environ, system: Path = SYS) -> int:
    """Threads for this process: OMP_NUM_THREADS if the user set it, otherwise its share of the physical cores.

    ``local_size``: processes on this host. Set the number as OMP_NUM_THREADS before torch is loaded, or by
    torch.set_num_threads afterwards.
    """
    chosen = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if chosen.isdigit() and int(chosen):
        return int(chosen)
    allowed = os.sched_getaffinity(0)
    given = env.get("SLURM_CPUS_PER_TASK", "")
    if given.isdigit() and int(given):
        return max(1, min(int(given), physical(allowed, system)))
    mine = physical(allowed, system)
    if not bound(allowed, env):
        return max(1, int(min(mine, quota(system))) // local_size)
    # a launcher that binds to sockets gives several processes the same cores
    return max(1, min(mine, (os.cpu_count() or 1) // local_size))


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
    found = set()
    for core in cores:
        path = system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        try:
            found.add(path.read_text().strip())
        except OSError:
            found.add(str(core))
    return len(found)


def quota(system: Path = SYS) -> float:
    """CPUs that this container may use by its quota; infinite without one."""
    with suppress(OSError, ValueError):
        most, _, period = (system / "fs/cgroup/cpu.max").read_text().partition(" ")  # cgroup v2
        return float(most) / float(period)
    with suppress(OSError, ValueError):
        limit = int((system / "fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        if limit > 0:
            return limit / int((system / "fs/cgroup/cpu/cpu.cfs_period_us").read_text())
    return float("inf")


def cores_of(text: str) -> list[int]:
    """The kernel's list ``0-3,8`` as numbers."""
    ends = [part.partition("-")[::2] for part in text.strip().split(",") if part]
    return [core for first, last in ends for core in range(int(first), int(last or first) + 1)]


def numa(system: Path = SYS) -> list[list[int]]:
    """Cores of each NUMA node that has any."""
    nodes = sorted((system / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    found = []
    for node in nodes:
        with suppress(OSError, ValueError):
            found.append(cores_of((node / "cpulist").read_text()))
    return [cores for cores in found if cores]


def near(pci: str, system: Path = SYS) -> list[int]:
    """Cores near the PCI device ``pci`` (0000:17:00.0); empty if unknown."""
    with suppress(OSError, ValueError):
        return cores_of((system / "bus/pci/devices" / pci.lower() / "local_cpulist").read_text())
    return []


def share(local_rank: int, local_size: int, allowed: Collection[int], nodes: list[list[int]]) -> list[int]:
    """Cores for one of ``local_size`` processes: whole NUMA nodes if there are enough, otherwise one node, shared."""
    usable = [cores for cores in ([core for core in node if core in allowed] for node in nodes) if cores]
    if not usable:
        return sorted(allowed)
    first = local_rank * len(usable) // local_size
    last = max(first + 1, (local_rank + 1) * len(usable) // local_size)
    return sorted(core for node in usable[first:last] for core in node)


def bind(
    local_rank: int, local_size: int, pci: str | None = None, env: Mapping[str, str] = os.environ, system: Path = SYS
) -> str:
    """Bind this process to the cores near its GPU (PCI address ``pci``), or to its share; returns what was done, and why.

    Nothing is done if the launcher has bound the process, or if there is only one process or NUMA node.
    """
    allowed = os.sched_getaffinity(0)
    nodes = numa(system)
    reach = [node for node in nodes if allowed.intersection(node)]
    if local_size == 1 or len(reach) < 2:
        return f"{described(allowed)}, not bound: " + (
            "the only process on this host" if local_size == 1 else "one NUMA node"
        )
    if bound(allowed, env):
        return f"{described(allowed)}, bound by the launcher"
    close = allowed.intersection(near(pci, system)) if pci else set()
    wanted = sorted(close) or share(local_rank, local_size, allowed, nodes)
    for task in Path("/proc/self/task").glob("[0-9]*"):  # also threads that libraries have already started
        with suppress(OSError):
            os.sched_setaffinity(int(task.name), wanted)
    return f"{described(wanted)}, {'near GPU ' + str(pci) if close else 'its share of the NUMA nodes'}"


def described(cores: Collection[int]) -> str:
    """``cores 0-3,8``."""
    return f"core{'s' * (len(cores) != 1)} {ranges(cores).replace(', ', ',')}"


def idle_threads_sleep() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user chose otherwise; call it before torch is loaded.

    Spinning threads that share their core with another process make a step ten times as slow.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def limit_threads(count: int) -> None:
    """Let numerical libraries use ``count`` threads; call it before torch is loaded."""
    os.environ["OMP_NUM_THREADS"] = str(count)


def limit_threads_of(processes: int) -> None:
    """Let each of ``processes`` child processes use its share of the cores, unless the user chose otherwise.

    torchrun's default is one thread each.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads(processes, env={})))


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: a blend of datasets keeps several for each of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft != hard else (soft, hard))
