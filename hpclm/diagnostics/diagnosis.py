"""Conclusions from what ``hpclm doctor`` shows: problems that would stop a run, hints, and a remedy for each."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from hpclm.diagnostics import verdict
from hpclm.node.facts import Facts


def diagnose(everyone: Sequence[Facts]) -> tuple[list[str], list[str]]:
    """Problems and hints, each once; with the hosts if not all of them have it."""
    versions = [
        {
            "node": facts["process"]["host"],
            "hpclm": facts["software"]["hpclm"],
            "python": facts["software"]["python"],
            "torch": facts["torch"].get("version"),
            "driver": facts["machine"]["driver"],
        }
        for facts in everyone
    ]
    differing = [finding.text for finding in verdict.agreement(versions)]
    return [*_of_all(problems_of, everyone), *differing], _of_all(hints_of, everyone)


def _of_all(check: Callable[[Facts], Iterable[str]], everyone: Sequence[Facts]) -> list[str]:
    hosts: dict[str, set[str]] = {}
    for facts in everyone:
        for text in check(facts):
            hosts.setdefault(text, set()).add(facts["process"]["host"])
    count = len({facts["process"]["host"] for facts in everyone})
    return [text if len(on) == count else f"on {', '.join(sorted(on))}: {text}" for text, on in hosts.items()]


def problems_of(facts: Facts) -> Iterator[str]:
    """What would stop a run of this process."""
    torch, process, mpi = facts["torch"], facts["process"], facts["programs"].get("mpi4py")
    if "error" in process:
        yield process["error"]
    if "error" in torch:
        yield f"PyTorch cannot be loaded ({torch['error']}): reinstall it, or load the modules it was built with"
        return
    gpus, local = torch["gpus"], process.get("local_size", 1)
    if 1 < len(gpus) < local:
        yield f"{local} processes see {len(gpus)} GPUs: request one GPU for each process of a node"
    numbers = [_number(name) for name in torch["architectures"]]
    for capability in sorted({gpu["capability"] for gpu in gpus} if numbers else set()):
        number = _number(capability)
        if number < min(numbers) or number // 10 > max(numbers) // 10:
            listed = ", ".join(torch["architectures"])
            yield f"this PyTorch has no code for sm_{number}, only for {listed}: install another build"
    if process.get("launcher") in ("Open MPI", "MPI") and (mpi is None or "error" in mpi):
        why = "is not installed" if mpi is None else f"cannot load its library ({mpi['error']})"
        yield f"{process['launcher']} started this process, but mpi4py {why}: pip install 'hpclm[mpi]', for your mpirun's MPI"


def hints_of(facts: Facts) -> Iterator[str]:
    """What will not stop a run of this process, but may surprise its user."""
    torch, machine, programs = facts["torch"], facts["machine"], facts["programs"]
    if "error" not in torch and not torch["gpus"] and (machine["gpu_files"] or machine["driver"]):
        visible = facts["variables"].get("CUDA_VISIBLE_DEVICES")
        if torch["cuda"] is None:
            yield "this machine has GPUs, but this PyTorch is a build without CUDA: install the CUDA build"
        elif visible in ("", "-1", "NoDevFiles"):
            yield f"CUDA_VISIBLE_DEVICES={visible} hides the GPUs: request GPUs from the scheduler, or unset it"
        else:
            yield (
                f"this machine has GPUs, but PyTorch built for CUDA {torch['cuda']} sees none with driver "
                f"{machine['driver']}: the driver may be too old, or the job has no GPUs"
            )
    if "error" in (apex := programs.get("apex", {})):
        yield (
            f"apex {facts['software']['apex']} cannot be loaded ({apex['error']}): PyPI's is an unrelated package; "
            "pip uninstall apex, or build NVIDIA's; hpclm does not need it"
        )
    mpirun, mpi = programs["mpirun"].get("says"), programs.get("mpi4py", {})
    if mpirun and "library" in mpi and _mpi_family(mpirun) != _mpi_family(mpi["library"]):
        yield f"mpirun is {mpirun}, but mpi4py uses {mpi['library']}: each rank would be on its own"
    if "says" in programs["sbatch"] and "error" in programs["controller"]:
        yield f"sbatch is installed, but Slurm's controller does not answer: {programs['controller']['error']}"
    shm = machine["shm"]
    if shm and shm["size"] <= 64 << 20:
        yield f"/dev/shm has only {shm['size'] >> 20} MiB, a container's default: start it with --shm-size=8g or --ipc=host"
    if machine["infiniband"] and machine["locked_memory"] and machine["locked_memory"] < 1 << 30:
        yield "InfiniBand needs locked memory, which is limited here: ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept)"


def _mpi_family(text: str) -> str:
    """The MPI implementation that a version line names."""
    lower = text.lower().replace(" ", "").replace("-", "")
    families = {"openmpi": "Open MPI", "intel": "Intel", "mpich": "MPICH", "hydra": "MPICH"}
    return next((family for word, family in families.items() if word in lower), text)


def _number(architecture: str) -> int:
    """``sm_90a`` and ``9.0`` -> 90."""
    return int("".join(filter(str.isdigit, architecture)) or 0)
