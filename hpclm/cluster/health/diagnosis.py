"""What follows from what ``hpclm doctor`` found: what would stop a run, what to know, and what to do about it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Found = dict[str, Any]
GIB = 1 << 30


def of(everyone: Sequence[Found]) -> tuple[list[str], list[str]]:
    """Sentences for what would stop a run, and for what is only worth knowing; each once, with whom it concerns."""
    problems = [(i, text) for i, found in enumerate(everyone) for text in wrong(found)]
    hints = [(i, text) for i, found in enumerate(everyone) for text in worth(found)]
    return [*_once(problems, everyone), *differing(everyone)], list(_once(hints, everyone))


def _once(said: list[tuple[int, str]], everyone: Sequence[Found]) -> Iterator[str]:
    """Each sentence once, with the hosts it is true of when that is not all of them."""
    for text in dict.fromkeys(text for _, text in said):
        hosts = {everyone[i]["host"]["name"] for i, other in said if other == text}
        some = len(hosts) < len({found["host"]["name"] for found in everyone})
        yield f"on {', '.join(sorted(hosts))}: {text}" if some else text


def differing(everyone: Sequence[Found]) -> Iterator[str]:
    """Versions that are not the same on all hosts."""
    versions = {
        "hpclm": lambda found: found["software"]["hpclm"],
        "python": lambda found: found["software"]["python"],
        "torch": lambda found: found["torch"].get("version"),
        "driver": lambda found: found["torch"].get("driver"),
    }
    for name, version in versions.items():
        groups: dict[str, set[str]] = {}
        for found in everyone:
            groups.setdefault(str(version(found)), set()).add(found["host"]["name"])
        if len(groups) > 1:
            yield f"{name} differs: " + "; ".join(f"{v} on {', '.join(sorted(h))}" for v, h in groups.items())


def wrong(found: Found) -> Iterator[str]:
    """What would stop a run of this process."""
    torch, world = found["torch"], found["launcher"]
    if "error" in world:
        yield world["error"]
    if "error" in torch:
        yield f"PyTorch cannot be loaded ({torch['error']}): install it anew, or load the modules it was built with"
        return
    gpus, local = torch["gpus"], world.get("local_size", 1)
    if 1 < len(gpus) < local:
        yield f"{local} processes see {len(gpus)} GPUs: ask for as many GPUs as processes of a node"
    shared = [uuid for uuid, count in Counter(gpu["uuid"] for gpu in gpus).items() if uuid and count > 1]
    if shared:
        yield f"one GPU is listed twice in CUDA_VISIBLE_DEVICES: {', '.join(shared)}"
    kinds = {f"sm_{gpu['capability'].replace('.', '')}" for gpu in gpus} if torch["architectures"] else set()
    newest = max((_number(name) for name in torch["architectures"]), default=0)
    for kind in sorted(kinds):
        if _number(kind) < min(map(_number, torch["architectures"])) or _number(kind) // 10 > newest // 10:
            yield f"this PyTorch has no code for {kind}, only for {', '.join(torch['architectures'])}: install another build"
    mpi = found["mpi"]["mpi4py"]
    if world.get("launcher") in ("Open MPI", "MPI") and (mpi is None or "error" in mpi):
        why = "is not installed" if mpi is None else f"cannot load its library ({mpi['error']})"
        yield f"{world['launcher']} started this process, but mpi4py {why}: pip install mpi4py for the MPI of your mpirun"


def worth(found: Found) -> Iterator[str]:
    """What will not stop a run, but may surprise."""
    torch, machine, mpi = found["torch"], found["machine"], found["mpi"]
    if "error" not in torch and not torch["gpus"] and (machine["gpu_files"] or torch["driver"]):
        visible = found["variables"]["libraries"].get("CUDA_VISIBLE_DEVICES")
        if torch["cuda"] is None:
            yield "this machine has GPUs, but this PyTorch is a build without CUDA: install the CUDA build"
        elif visible in ("", "-1", "NoDevFiles"):
            yield f"CUDA_VISIBLE_DEVICES={visible} hides the GPUs: ask the scheduler for some, or unset it"
        else:
            yield (
                f"this machine has GPUs, but PyTorch built for CUDA {torch['cuda']} sees none with driver "
                f"{torch['driver']}: the driver may be too old, or the job has no GPUs"
            )
    if found["software"]["apex"] and "not NVIDIA's" in apex(found):
        yield f"apex {apex(found)}: pip uninstall apex, or build NVIDIA's; hpclm does without"
    if mpi["mpi4py"] and "error" in mpi["mpi4py"]:
        yield f"mpi4py cannot load an MPI library ({mpi['mpi4py']['error']}): needed under mpirun only"
    elif (
        mpi["mpi4py"]
        and "says" in mpi["mpirun"]
        and _family(mpi["mpirun"]["says"]) != _family(mpi["mpi4py"]["library"])
    ):
        yield f"mpirun is {mpi['mpirun']['says']}, but mpi4py uses {mpi['mpi4py']['library']}: each rank would be alone"
    slurm = found["slurm"]
    if "says" in slurm["sbatch"] and "error" in slurm["controller"]:
        yield f"sbatch is installed, but Slurm's controller does not answer: {slurm['controller']['error']}"
    shm = machine["shm"]
    if shm and shm["size"] <= 64 << 20:
        yield f"/dev/shm has {shm['size'] >> 20} MiB only, a container's default: --shm-size=8g or --ipc=host"
    if machine["open_files"] and machine["open_files"] < 1024:
        yield f"{machine['open_files']} open files are allowed: ulimit -n 4096"
    if machine["infiniband"] and machine["locked_memory"] and machine["locked_memory"] < GIB:
        yield "InfiniBand needs locked memory, which is limited here: ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept)"
    for lock in found["locks"]:
        if lock["holder"] is None:
            yield (
                f"{lock['path']} locks a build of a PyTorch extension, and no process here holds it (last write "
                f"{lock['age'] / 60:.0f} minutes ago): if no other machine builds it, remove it"
            )


def apex(found: Found) -> str:
    """Whose apex is installed, and whether it works."""
    if found["apex"] is None:
        return f"{found['software']['apex']} is PyPI's unrelated package, not NVIDIA's"
    if "error" in found["apex"]:
        return f"{found['software']['apex']} is NVIDIA's, but was not built: {found['apex']['error']}"
    return f"{found['software']['apex']}, NVIDIA's"


def kernels(found: Found) -> str:
    """Whose fused operations a run here can use."""
    apex = found["apex"] or {}
    usable = [name for name, works in apex.items() if works is True]
    if not usable:
        return "PyTorch's; NVIDIA's apex is not here"
    return f"PyTorch's, or with model.kernels=apex and optim.name=apex_adam apex's: {', '.join(usable)}"


def gib(count: int | None) -> str:
    """Bytes in GiB."""
    return "-" if count is None else f"{count / GIB:.1f} GiB"


def _family(text: str) -> str:
    """Which MPI a version line is of."""
    lower = text.lower().replace(" ", "")
    names = {"openmpi": "Open MPI", "open-mpi": "Open MPI", "intel": "Intel", "mpich": "MPICH", "hydra": "MPICH"}
    return next((name for word, name in names.items() if word in lower), text)


def _number(architecture: str) -> int:
    """``sm_90a`` -> 90."""
    return int("".join(filter(str.isdigit, architecture)) or 0)
