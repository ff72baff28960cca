"""The facts of a process: information from the system, its libraries and its launcher.

The preflight check gathers ``of_process`` and ``of_device`` from every rank and compares them. ``hpclm doctor`` shows ``everything``.
"""

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm import __version__
from hpclm.base import extras, files
from hpclm.base.terminal import many, ranges
from hpclm.distributed import network
from hpclm.distributed.bootstrap import World
from hpclm.node import environment, import_errors, python, secrets, threads

if TYPE_CHECKING:
    import torch

Facts = dict[str, Any]
"""Names and values, as JSON."""

DECISIVE = ("numpy", "triton", "deepspeed", "fairscale", "safetensors")
"""Libraries besides PyTorch that take part in training; a run needs the same version of each on every node."""
TORCH = """
import json, os, warnings
warnings.simplefilter("ignore")
from hpclm.diagnostics import facts
answer = facts.imports()
os.chdir("/")  # collect_env starts pip, which would find modules in the current folder
try:
    answer |= facts.pytorch()
except Exception as error:
    answer["error"] = facts.reason(error)
print(json.dumps(answer))
"""
VARIABLES = re.compile("CUDA|GLOO_|LD_|LOCAL_|MASTER_|NCCL_|OMP|PMI|RANK|SLURM|TORCH|WORLD_SIZE")
"""Prefixes of the variables to show, except names of secrets."""

TRAINING = "hpclm.training.loop"
"""The module that imports everything a rank needs."""


def of_process(node: str, env: Mapping[str, str] = os.environ) -> Facts:
    """The current facts of the node that its scheduler calls ``node``, and versions; does not load PyTorch."""
    allowed = os.sched_getaffinity(os.getpid())
    return {
        "node": node,
        "host": socket.gethostname(),
        "machine": files.network_of(files.here()),
        "pid": os.getpid(),
        "hpclm": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in DECISIVE},
        "visible": env.get("CUDA_VISIBLE_DEVICES"),
        "cores": f"{ranges(allowed)} ({threads.physical(allowed)} physical) of {os.cpu_count()}",
        "allowed_cores": ranges(allowed),
        "cores_of_job": threads.available(env),
        "shm": shutil.disk_usage("/dev/shm")._asdict() if Path("/dev/shm").is_dir() else None,
        "driver": driver(),
    }


def version(package: str) -> str | None:
    """The installed version of a package; None without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """Version of NVIDIA's kernel driver; None without one."""
    with suppress(OSError, IndexError, StopIteration):
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return next(word for word in first.split() if word[:1].isdigit() and "." in word)
    return None


def of_device(device: "torch.device") -> Facts:
    """The device of a training process, and the versions of its software stack."""
    import torch

    if device.type != "cuda":
        return of_torch() | {"device": str(device), "device_name": "CPU", "driver": None}  # a CPU needs no driver
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return of_torch() | {
        "device": str(device),
        "device_name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")) or None,
        "device_total": total,
        "device_used": max(0, total - free - torch.cuda.memory_reserved(device)),
    }


def of_torch() -> Facts:
    """Versions of PyTorch and of the libraries it was built with."""
    import torch
    import torch.distributed as dist

    has_nccl = torch.version.cuda and dist.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}


def pytorch() -> Facts:
    """PyTorch's report (``torch.utils.collect_env``), and whether its GPUs compute; loads PyTorch."""
    import torch
    from torch.utils import collect_env

    reported = {name: str(value) for name, value in collect_env.get_env_info()._asdict().items() if name != "cpu_info"}
    names = []
    broken = []
    for index in range(torch.cuda.device_count()):
        names.append(torch.cuda.get_device_name(index))
        try:
            torch.ones(1, device=f"cuda:{index}").add(1).item()
        except RuntimeError as error:
            broken.append(f"GPU {index} ({names[-1]}) does not compute: {str(error).splitlines()[0]}")
    return of_torch() | {
        "device_name": names[0] if names else "CPU",
        "gpus": len(names),
        "broken": broken,
        "collect_env": {name: value for name, value in reported.items() if value not in ("None", "N/A")},
    }


def everything(world: World, node: str, env: Mapping[str, str] = os.environ) -> Facts:
    """The facts that ``hpclm doctor`` shows of this process. ``world``: the launcher's view; ``node``: the scheduler's name of the node.

    PyTorch runs in a separate process, so that a crash or hang gives {"error": reason}.
    """
    redact = secrets.Redactor(env)
    return {
        **{name: getattr(world, name) for name in ("launcher", "rank", "size", "local_rank", "local_size")},
        **of_process(node, env),
        "torch": None,
        **python.ask(TORCH, env, seconds=120),
        "outside": import_errors.outside([*import_errors.REQUIRED, *sorted(sys.stdlib_module_names)]),
        **{name: version(name) for name in ("apex", "mpi4py", "tokenizers")},
        **{name: shutil.which(name) for name in ("mpirun", "sbatch")},
        "threads": threads.per_process(world.local_size, env),
        "site file": str(environment.site_file(env) or "none"),
        "network": network.addresses(),
        "variables": {
            name: redact(env[name]) for name in sorted(env) if VARIABLES.match(name) and not secrets.is_secret(name)
        },
    }


def imports() -> Facts:
    """Errors of importing training's libraries, one line per library, and the shared libraries from LD_LIBRARY_PATH."""
    failures = []
    for name in (*import_errors.REQUIRED, TRAINING):
        try:
            import_module(name)
        except Exception as error:
            failures.append(import_errors.explained(error) or f"{name} cannot be imported: {reason(error)}")
    first = {text.partition(" ")[0]: text for text in reversed(failures)}
    return {"import_failures": [*reversed(first.values()), *_too_old()], "linked": _linked()}


def _too_old() -> Iterator[str]:
    """Libraries that are older than hpclm requires."""
    with suppress(metadata.PackageNotFoundError):
        for requirement in metadata.requires("hpclm") or ():
            needed = re.fullmatch(r"([\w-]+) ?>=([\d.]+)", requirement)
            if needed is None:
                continue
            name = needed[1]
            release = needed[2]
            installed = extras.older(name, release)
            if installed:
                yield extras.too_old("hpclm", name, release, installed, f"pip install -U {name}")


def _linked() -> list[str]:
    """The shared libraries of this process from folders of LD_LIBRARY_PATH."""
    folders = {Path(folder).resolve() for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder}
    mapped = set(re.findall(r"/\S+\.so\S*", Path("/proc/self/maps").read_text(errors="replace")))
    return sorted(path for path in mapped if Path(path).parent in folders)


def reason(error: BaseException) -> str:
    """The kind of an error, and the last line of its text."""
    return ": ".join([type(error).__name__, *[line.strip() for line in str(error).splitlines() if line.strip()][-1:]])


def lines(facts: Facts) -> list[str]:
    """All facts, a line for each."""
    text = []
    for name, value in facts.items():
        if isinstance(value, dict) and name in ("collect_env", "network", "variables"):
            text += [name, *(f"  {inner:<24}{_shown(part)}" for inner, part in value.items())]
        else:
            text.append(f"{name:<26}{_shown(value)}")
    return text


def line(facts: Facts) -> str:
    """The facts of one process in one line."""
    gpus = facts.get("gpus")
    visible = facts["visible"]
    device = f"{gpus} x {facts['device_name']}" if gpus else "CPU"
    if visible is not None:
        device += f" (CUDA_VISIBLE_DEVICES={visible})"
    rank = f"rank {facts['rank']}/{facts['size']}  {facts['host']}  local {facts['local_rank']}/{facts['local_size']}"
    return f"{rank}  {facts['launcher']}  {device}  {many(facts['threads'], 'thread')}  python {facts['python']}  torch {facts['torch']}"


def _shown(value: Any) -> str:
    """A value for people: bytes in GiB, lists and objects in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(map(_shown, value)) or "none"
    if isinstance(value, int) and value >= 1 << 24:
        return f"{value / (1 << 30):.1f} GiB"
    if value is None:
        return "none"
    return str(value).replace("\n", "; ")
