"""The facts of a process: what the system, its libraries and its launcher say about it.

The preflight check gathers ``of_process`` and ``of_device`` from every rank and compares them. ``hpclm doctor`` shows ``everything``.
"""

import os
import platform
import re
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm import __version__, files
from hpclm.distributed import network
from hpclm.distributed.bootstrap import World
from hpclm.node import environment, python, secrets, shadows, threads
from hpclm.terminal import ranges

if TYPE_CHECKING:
    import torch

Facts = dict[str, Any]
"""Names and values, as JSON."""

DECISIVE = ("numpy", "triton", "deepspeed", "fairscale", "safetensors")
"""Libraries beside PyTorch that take part in training: a run needs the same version of each on every node."""
TORCH = """
import json, os, warnings
warnings.simplefilter("ignore")
from hpclm.diagnostics import facts, libraries
answer = libraries.imports()
os.chdir("/")  # collect_env starts pip
try:
    answer |= facts.pytorch()
except Exception as error:
    answer["error"] = libraries.reason(error)
print(json.dumps(answer))
"""
VARIABLES = re.compile("CUDA|GLOO_|LD_LIB|LOCAL_|MASTER_|NCCL_|OMP|PMI|RANK|SLURM|TORCH|WORLD_SIZE")
"""Beginnings of the variables that are shown, unless their names are those of secrets."""


def of_process(launcher: str, env: Mapping[str, str] = os.environ) -> Facts:
    """The node at this moment, and versions; PyTorch is not loaded."""
    allowed = threads.noted_cores(env)
    return {
        "node": node_name(launcher, env),
        "host": socket.gethostname(),
        "machine": files.network_of(files.here()),
        "pid": os.getpid(),
        "hpclm": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in DECISIVE},
        "visible": env.get("CUDA_VISIBLE_DEVICES"),
        "cores": f"{ranges(allowed)} ({threads.physical(allowed)} physical) of {os.cpu_count()}",
        "main_cores": ranges(os.sched_getaffinity(os.getpid())),
        "cores_of_job": threads.available(env),
        "binding": threads.binding(env),
        "shm": shutil.disk_usage("/dev/shm")._asdict() if Path("/dev/shm").is_dir() else None,
        "driver": driver(),
    }


def node_name(launcher: str, env: Mapping[str, str] = os.environ) -> str:
    """This machine's name in Slurm, otherwise its host name.

    HOSTNAME is that of the machine the job script runs on; under mpirun, SLURMD_NODENAME may be, too.
    """
    return (launcher == "Slurm" and env.get("SLURMD_NODENAME")) or socket.gethostname()


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
    """The device of a training process, and the versions of what drives it."""
    import torch

    if device.type != "cuda":
        return of_torch() | {"device": str(device), "device_name": "CPU", "driver": None}  # no driver matters to it
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
    """Versions of PyTorch and of what it is built with."""
    import torch
    import torch.distributed as dist

    has_nccl = torch.version.cuda and dist.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}


def pytorch() -> Facts:
    """What PyTorch reports (``torch.utils.collect_env``), and whether its GPUs compute; loads PyTorch."""
    import torch
    from torch.utils import collect_env

    torch.zeros(1 << 20).add_(1)  # in parallel: the OpenMP threads begin
    reported = {name: str(value) for name, value in collect_env.get_env_info()._asdict().items() if name != "cpu_info"}
    names, broken = [], []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        names.append(torch.cuda.get_device_name(index))
        try:
            torch.ones(1, device=f"cuda:{index}").add(1).item()
        except RuntimeError as error:
            broken.append(f"GPU {index} ({names[-1]}) does not compute: {str(error).splitlines()[0]}")
    return of_torch() | {
        "device_name": names[0] if names else "CPU",
        "gpus": len(names),
        "broken": broken,
        "main_cores": ranges(os.sched_getaffinity(os.getpid())),
        "computing_cores": ranges(threads.computing_cores()),
        "collect_env": {name: value for name, value in reported.items() if value not in ("None", "N/A")},
    }


def everything(world: World, env: Mapping[str, str] = os.environ) -> Facts:
    """What ``hpclm doctor`` shows of this process, which its launcher calls ``world``.

    PyTorch is asked in a process of its own, so that one that crashes or hangs is an answer too: {"error": reason}.
    """
    redact = secrets.Redactor(env)
    return {
        **{name: getattr(world, name) for name in ("launcher", "rank", "size", "local_rank", "local_size")},
        **of_process(world.launcher, env),
        "torch": None,
        **python.ask(TORCH, env, seconds=120),
        "outside": [f"{library}; {library.way_out}" for library in shadows.outside()],
        **{name: version(name) for name in ("apex", "mpi4py", "tokenizers")},
        **{name: shutil.which(name) for name in ("mpirun", "sbatch")},
        "threads": threads.per_process(world.local_size, env),
        "site file": str(environment.site_file(env) or "none"),
        "network": network.addresses(),
        "variables": {
            name: redact(env[name]) for name in sorted(env) if VARIABLES.match(name) and not secrets.is_secret(name)
        },
    }
