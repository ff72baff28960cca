"""Which cores a process runs on, and how many threads it uses there.

Several processes share a machine. Each must use its own part of the cores, and those that are near its GPU, or they take
turns on the same ones.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

SYS = Path("/sys")


def threads(local_size: int, env: Mapping[str, str] = os.environ, system: Path = SYS) -> int:
    """Threads for this process: OMP_NUM_THREADS if the user set it, else its share of the physical cores.

    ``local_size`` processes run on this host. The number takes effect as OMP_NUM_THREADS before torch is loaded, or
    through torch.set_num_threads after.
    """
    wish = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wish.isdigit() and int(wish):
        return int(wish)
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
    """Whether the launcher gave this process cores of its own: fewer than the job has on this host.

    Only srun and MPI's launchers bind; under any other, fewer cores than the machine has are all the processes' together.
    """
    if not any(name in env for name in ("SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")):
        return False
    if any(name in env for name in ("HPCLM_RANK", "TORCHELASTIC_RUN_ID")):  # started by one process of such a step
        return False
    job = env.get("SLURM_CPUS_ON_NODE", "")
    return len(allowed) < min(int(job) if job.isdigit() else os.cpu_count() or 1, os.cpu_count() or 1)


def physical(cores: Collection[int], system: Path = SYS) -> int:
    """How many physical cores the logical ``cores`` are: hyperthreads of one count once."""
    found = set()
    for core in cores:
        path = system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        try:
            found.add(path.read_text().strip())
        except OSError:
            found.add(str(core))
    return len(found)


def quota(system: Path = SYS) -> float:
    """CPUs' worth of time that this container may use; infinite where nothing limits it."""
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
    """Cores near the PCI device ``pci`` (0000:17:00.0); none where the machine does not say."""
    with suppress(OSError, ValueError):
        return cores_of((system / "bus/pci/devices" / pci.lower() / "local_cpulist").read_text())
    return []


def share(local_rank: int, local_size: int, allowed: Collection[int], nodes: list[list[int]]) -> list[int]:
    """Cores for one of ``local_size`` processes: whole NUMA nodes where there are enough, else one node with others."""
    usable = [cores for cores in ([core for core in node if core in allowed] for node in nodes) if cores]
    if not usable:
        return sorted(allowed)
    first = local_rank * len(usable) // local_size
    last = max(first + 1, (local_rank + 1) * len(usable) // local_size)
    return sorted(core for node in usable[first:last] for core in node)


def bind(
    local_rank: int,
    local_size: int,
    pci: str | None = None,
    env: Mapping[str, str] = os.environ,
    system: Path = SYS,
) -> str:
    """Keep this process on the cores near its GPU (PCI address ``pci``), or on its share; says what was done, and why.

    Nothing is done where the launcher has bound the process, or there is but one process or NUMA node.
    """
    allowed = os.sched_getaffinity(0)
    nodes = numa(system)
    reach = [node for node in nodes if allowed.intersection(node)]
    if local_size == 1 or len(reach) < 2:
        return f"{counted(allowed)}, not bound: " + ("alone on this host" if local_size == 1 else "one NUMA node")
    if bound(allowed, env):
        return f"{counted(allowed)}, bound by the launcher"
    close = allowed.intersection(near(pci, system)) if pci else set()
    wanted = sorted(close) or share(local_rank, local_size, allowed, nodes)
    for task in Path("/proc/self/task").glob("[0-9]*"):  # threads that libraries have already started, too
        with suppress(OSError):
            os.sched_setaffinity(int(task.name), wanted)
    return f"{counted(wanted)}, {'near GPU ' + str(pci) if close else 'its share of the NUMA nodes'}"


def counted(cores: Collection[int]) -> str:
    """``cores 0-3,8`` in words."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"core{'s' * (len(cores) != 1)} {listed}"
