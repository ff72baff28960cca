"""How many threads each of the processes that share a machine uses, and what every process sets for itself first."""

import os
import resource
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hpclm.node import slurm

SYS = Path("/sys")
GROUPS = Path("/proc/self/cgroup")
CORES = "HPCLM_CORES"
"""Variable with the PID of a process of hpclm and the cores that it could use when it began, for itself and what it starts."""
WAITING = "OMP_WAIT_POLICY"
"""Variable that says whether idle threads of an OpenMP runtime sleep or spin; it is read when the runtime is loaded."""
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which an OpenMP runtime binds threads to cores: PyTorch's binds the main thread as soon as it is loaded."""


def per_process(local_size: int, env: Mapping[str, str] = os.environ, system: Path = SYS) -> int:
    """Threads for this process, one of ``local_size`` on its host: OMP_NUM_THREADS if the user set it, otherwise its share of
    the physical cores.

    Set the number as OMP_NUM_THREADS before torch is loaded, or by torch.set_num_threads afterwards.
    """
    chosen = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if chosen.isdigit() and int(chosen):
        return int(chosen)
    allowed = noted_cores(env)
    cores = min(physical(allowed, system), quota(system))
    if given := slurm.cores_per_task(env):
        return max(1, min(given, cores))
    if not bound(allowed, env):
        return max(1, cores // local_size)
    # a launcher that binds to sockets gives several processes the same cores
    return max(1, min(cores, (os.cpu_count() or 1) // local_size))


def bound(allowed: Collection[int], env: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher bound this process to cores: fewer than the job has on this host.

    Only srun and MPI's launchers bind. Under any other launcher, all processes share the cores that are allowed.
    """
    if not any(name in env for name in (slurm.STEP, "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")):
        return False
    if "TORCHELASTIC_RUN_ID" in env:  # started by one process of such a step
        return False
    machine = os.cpu_count() or 1
    return len(allowed) < min(slurm.cores_on_node(env) or machine, machine)


def physical(cores: Collection[int], system: Path = SYS) -> int:
    """How many physical cores the logical ``cores`` belong to."""
    siblings = set()
    for core in cores:
        try:
            siblings.add((system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(core))
    return len(siblings)


def usable(env: Mapping[str, str] = os.environ) -> int:
    """How many cores this process may use: those that it may run on, or fewer if its cgroup has less time on the CPU."""
    return min(len(noted_cores(env)), quota())


def quota(system: Path = SYS, groups: Path = GROUPS) -> int:
    """How many whole cores the CPU quotas of this process's cgroups are worth, at least 1; sys.maxsize without a quota."""
    cores: float = sys.maxsize
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers:
                folder, names = system / "fs/cgroup", ["cpu.max"]
            elif "cpu" in controllers.split(","):
                folder, names = system / "fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            else:
                continue
            folder /= name.lstrip("/")
            for level in (
                folder,
                *folder.parents,
            ):  # every group above it limits it too; a container sees only the root
                with suppress(OSError, ValueError):  # of the root of a machine, and "max"
                    quota, period = " ".join((level / name).read_text() for name in names).split()
                    if int(quota) > 0:  # -1 is no limit
                        cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def note_cores(env: MutableMapping[str, str] = os.environ) -> None:
    """Note the cores that this process may use, before PyTorch is loaded, which may bind its main thread to one; the first call in
    a process counts."""
    if env.get(CORES, "").partition(" ")[0] != str(os.getpid()):
        env[CORES] = f"{os.getpid()} {','.join(map(str, sorted(os.sched_getaffinity(0))))}"


def noted_cores(env: Mapping[str, str] = os.environ) -> set[int]:
    """The cores that this process could use when it began, or the process that started it; without a note of these, those of now."""
    pid, _, cores = env.get(CORES, "").partition(" ")
    noted = (
        {int(core) for core in cores.split(",") if core.isdigit()}
        if pid in map(str, (os.getpid(), os.getppid()))
        else set()
    )
    return noted or os.sched_getaffinity(0)


def unbind(env: Mapping[str, str] = os.environ) -> None:
    """Let the calling thread, and what it starts, use all these cores again: it has inherited those of a main thread that the OpenMP
    runtime has bound."""
    with suppress(OSError):
        os.sched_setaffinity(0, noted_cores(env))


def computing_cores(env: Mapping[str, str] = os.environ) -> set[int]:
    """The cores on which the main thread and the OpenMP threads of this process compute, as the kernel has them; call it after the
    first parallel operation, which starts these threads."""
    noted, main = noted_cores(env), os.sched_getaffinity(os.getpid())
    if main == noted:
        return main
    cores = set(main)
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            allowed = os.sched_getaffinity(int(task.name))
            if allowed != noted:  # threads that began before the runtime was loaded have all cores
                cores |= allowed
    return cores


def binding(env: Mapping[str, str] = os.environ) -> str:
    """The variables that bind OpenMP threads, with their values; empty without any."""
    return ", ".join(f"{name}={env[name]}" for name in BINDING if env.get(name))


def available(env: Mapping[str, str] = os.environ) -> int:
    """How many cores of this machine the processes of the job may use, whatever this one is bound to."""

    def ask() -> None:  # a thread of its own, since it would stay unbound
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        allowed.update(os.sched_getaffinity(0))

    allowed = set[int]()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return min(len(allowed), slurm.cores_on_node(env) or len(allowed))


@contextmanager
def sleeping() -> Iterator[None]:
    """Idle threads of an OpenMP runtime that is loaded in the block sleep, unless the user chose otherwise; processes that are started
    after it choose for themselves."""
    chosen = os.environ.get(WAITING)
    os.environ.setdefault(WAITING, "PASSIVE")
    try:
        yield
    finally:
        if chosen is None:
            os.environ.pop(WAITING, None)


def prepare() -> None:
    """Let idle OpenMP threads sleep, unless the user chose otherwise, and raise soft limits, which may be a login shell's, to the hard
    ones.

    Called before torch is loaded. Spinning threads that share their core with another process make a step ten times as slow.
    """
    note_cores()
    os.environ.setdefault(WAITING, "PASSIVE")
    for name in ("CPU", "FSIZE", "NOFILE", "NPROC", "AS", "DATA", "RSS", "MEMLOCK"):
        limit = getattr(resource, f"RLIMIT_{name}")
        hard = soft = resource.getrlimit(limit)[1]
        if name == "CPU" and hard != resource.RLIM_INFINITY:
            soft -= hard // 10  # SIGXCPU comes at the soft limit, SIGKILL at the hard one
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (soft, hard))


def hard_limits() -> str:
    """The hard limits of this process that may end a run, in words; empty without one."""
    limits = {resource.RLIMIT_CPU: "s of CPU time (ulimit -t)", resource.RLIMIT_FSIZE: "bytes a file (ulimit -f)"}
    hard = {text: resource.getrlimit(limit)[1] for limit, text in limits.items()}
    return ", ".join(f"{number} {text}" for text, number in hard.items() if number != resource.RLIM_INFINITY)
