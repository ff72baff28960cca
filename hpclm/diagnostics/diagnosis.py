"""Conclusions from what ``hpclm doctor`` found: problems that would stop a run, hints, and a remedy for each."""

from collections import Counter
from collections.abc import Iterator, Sequence

from hpclm.diagnostics.report import GIB
from hpclm.node.facts import Facts


def of(everyone: Sequence[Facts]) -> tuple[list[str], list[str]]:
    """Problems and hints, each once; with the hosts if not all of them have it."""
    problems = [(i, text) for i, found in enumerate(everyone) for text in problems_of(found)]
    hints = [(i, text) for i, found in enumerate(everyone) for text in hints_of(found)]
    return [*_once(problems, everyone), *differing(everyone)], list(_once(hints, everyone))


def _once(said: list[tuple[int, str]], everyone: Sequence[Facts]) -> Iterator[str]:
    for text in dict.fromkeys(text for _, text in said):
        hosts = {everyone[i]["host"]["name"] for i, other in said if other == text}
        some = len(hosts) < len({found["host"]["name"] for found in everyone})
        yield f"on {', '.join(sorted(hosts))}: {text}" if some else text


def differing(everyone: Sequence[Facts]) -> Iterator[str]:
    """Versions that are not the same on all hosts."""
    versions = {
        "hpclm": lambda found: found["software"]["hpclm"],
        "python": lambda found: found["software"]["python"],
        "torch": lambda found: found["torch"].get("version"),
        "driver": lambda found: found["machine"]["driver"],
    }
    for name, version in versions.items():
        groups: dict[str, set[str]] = {}
        for found in everyone:
            groups.setdefault(str(version(found)), set()).add(found["host"]["name"])
        if len(groups) > 1:
            yield f"{name} differs: " + "; ".join(f"{v} on {', '.join(sorted(h))}" for v, h in groups.items())


def problems_of(found: Facts) -> Iterator[str]:
    """What would stop a run of this process."""
    torch, world = found["torch"], found["launcher"]
    if "error" in world:
        yield world["error"]
    if "error" in torch:
        yield f"PyTorch cannot be loaded ({torch['error']}): reinstall it, or load the modules it was built with"
        return
    gpus, local = torch["gpus"], world.get("local_size", 1)
    if 1 < len(gpus) < local:
        yield f"{local} processes see {len(gpus)} GPUs: request one GPU for each process of a node"
    shared = [uuid for uuid, count in Counter(gpu["uuid"] for gpu in gpus).items() if uuid and count > 1]
    if shared:
        yield f"one GPU is listed twice in CUDA_VISIBLE_DEVICES: {', '.join(shared)}"
    models = {f"sm_{gpu['capability'].replace('.', '')}" for gpu in gpus} if torch["architectures"] else set()
    newest = max((_number(name) for name in torch["architectures"]), default=0)
    for model in sorted(models):
        if _number(model) < min(map(_number, torch["architectures"])) or _number(model) // 10 > newest // 10:
            yield f"this PyTorch has no code for {model}, only for {', '.join(torch['architectures'])}: install another build"
    mpi = found["mpi"]["mpi4py"]
    if world.get("launcher") in ("Open MPI", "MPI") and (mpi is None or "error" in mpi):
        why = "is not installed" if mpi is None else f"cannot load its library ({mpi['error']})"
        yield f"{world['launcher']} started this process, but mpi4py {why}: pip install 'hpclm[mpi]', for the MPI of your mpirun"


def hints_of(found: Facts) -> Iterator[str]:
    """What will not stop a run of this process, but may surprise its user."""
    torch, machine, mpi = found["torch"], found["machine"], found["mpi"]
    if "error" not in torch and not torch["gpus"] and (machine["gpu_files"] or machine["driver"]):
        visible = found["variables"]["libraries"].get("CUDA_VISIBLE_DEVICES")
        if torch["cuda"] is None:
            yield "this machine has GPUs, but this PyTorch is a build without CUDA: install the CUDA build"
        elif visible in ("", "-1", "NoDevFiles"):
            yield f"CUDA_VISIBLE_DEVICES={visible} hides the GPUs: request GPUs from the scheduler, or unset it"
        else:
            yield (
                f"this machine has GPUs, but PyTorch built for CUDA {torch['cuda']} sees none with driver "
                f"{machine['driver']}: the driver may be too old, or the job has no GPUs"
            )
    if found["software"]["apex"] and "not NVIDIA's" in apex(found):
        yield f"apex {apex(found)}: pip uninstall apex, or build NVIDIA's; hpclm does not need it"
    if mpi["mpi4py"] and "error" in mpi["mpi4py"]:
        yield f"mpi4py cannot load an MPI library ({mpi['mpi4py']['error']}): only needed under mpirun"
    elif (
        mpi["mpi4py"]
        and "says" in mpi["mpirun"]
        and _family(mpi["mpirun"]["says"]) != _family(mpi["mpi4py"]["library"])
    ):
        yield f"mpirun is {mpi['mpirun']['says']}, but mpi4py uses {mpi['mpi4py']['library']}: each rank would be on its own"
    slurm = found["slurm"]
    if "says" in slurm["sbatch"] and "error" in slurm["controller"]:
        yield f"sbatch is installed, but Slurm's controller does not answer: {slurm['controller']['error']}"
    shm = machine["shm"]
    if shm and shm["size"] <= 64 << 20:
        yield f"/dev/shm has only {shm['size'] >> 20} MiB, a container's default: start the container with --shm-size=8g or --ipc=host"
    if machine["infiniband"] and machine["locked_memory"] and machine["locked_memory"] < GIB:
        yield "InfiniBand needs locked memory, which is limited here: ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept)"


def apex(found: Facts) -> str:
    """Which apex is installed, and whether it works."""
    if found["apex"] is None:
        return f"{found['software']['apex']} is PyPI's unrelated package, not NVIDIA's"
    if "error" in found["apex"]:
        return f"{found['software']['apex']} is NVIDIA's, but was not built: {found['apex']['error']}"
    return f"{found['software']['apex']}, NVIDIA's: {', '.join(found['apex']['kernels'])}"


def _family(text: str) -> str:
    """The MPI implementation that a version line names."""
    lower = text.lower().replace(" ", "")
    names = {"openmpi": "Open MPI", "open-mpi": "Open MPI", "intel": "Intel", "mpich": "MPICH", "hydra": "MPICH"}
    return next((name for word, name in names.items() if word in lower), text)


def _number(architecture: str) -> int:
    """``sm_90a`` -> 90."""
    return int("".join(filter(str.isdigit, architecture)) or 0)
