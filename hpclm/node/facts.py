"""The facts of a node: what the system, its libraries and its programs say about it.

The preflight check gathers ``of_process`` from every rank and compares; ``hpclm doctor`` shows all of it. ``python.ask`` and
``ask_program`` ask in a separate process, so that a library or program that crashes or hangs is an answer too.
"""

import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hpclm import __version__
from hpclm.node import affinity, processes
from hpclm.node.processes import NoAnswerError

if TYPE_CHECKING:
    import torch

Facts = dict[str, Any]
"""What a process has, as JSON; {"error": reason} if a library or program did not answer."""

LIBRARIES = ("deepspeed", "fairscale", "apex", "mpi4py", "submitit", "numpy", "safetensors", "tokenizers")
DECISIVE = ("numpy", "triton", "deepspeed", "fairscale", "safetensors")
"""Libraries beside PyTorch that take part in training: a run needs the same version of each on every node."""

TORCH = """
import json, warnings
warnings.simplefilter("ignore")
from hpclm.node import facts
print(json.dumps(facts.pytorch()))
"""
COLLECT_ENV = """
import json, os
from torch.utils import collect_env
os.chdir("/")  # it starts pip
answers = {name: str(answer) for name, answer in collect_env.get_env_info()._asdict().items()}
print(json.dumps({name: text for name, text in answers.items() if name != "cpu_info" and text not in ("None", "N/A")}))
"""
MPI = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps(dict(version=mpi4py.__version__, library=MPI.Get_library_version().split(",")[0].strip())))
"""
APEX = """
import json
from apex.optimizers import FusedAdam
from hpclm.node import apex
print(json.dumps({"kernels": ["FusedAdam", *apex.kernels().names()]}))
"""


def of_process(launcher: str, device: "torch.device", env: Mapping[str, str] = os.environ) -> Facts:
    """What the preflight check compares between processes: the node at this moment, its versions, and the device."""
    facts = {
        "time": time.time(),
        "node": node_name(launcher, env),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "hpclm": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in DECISIVE},
        "visible": env.get("CUDA_VISIBLE_DEVICES"),
        **machine(),
        **_device(device),
    }
    if device.type != "cuda":
        facts["driver"] = None  # it does not matter to a run on CPUs
    return facts


def node_name(launcher: str, env: Mapping[str, str] = os.environ) -> str:
    """This machine's name in Slurm, otherwise its host name.

    HOSTNAME is that of the machine the job script runs on; under mpirun, SLURMD_NODENAME may be, too.
    """
    return (launcher == "Slurm" and env.get("SLURMD_NODENAME")) or socket.gethostname()


def machine() -> Facts:
    """Cores, memory, limits and devices of this node."""
    allowed = os.sched_getaffinity(0)
    return {
        "cores": f"{affinity.described(allowed)} ({affinity.physical(allowed)} physical) of {os.cpu_count()}",
        "numa": [affinity.described(cores) for cores in affinity.numa()],
        "load": os.getloadavg()[0],
        "memory_free": psutil.virtual_memory().available,
        "shm": disk(Path("/dev/shm")),
        "open_files": limit(resource.RLIMIT_NOFILE),
        "locked_memory": limit(resource.RLIMIT_MEMLOCK),
        "gpu_files": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "driver": driver(),
    }


def limit(which: int) -> int | None:
    """The soft limit of a resource; None if it is unlimited."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def disk(folder: Path) -> dict[str, int] | None:
    """Size and free bytes of the file system of ``folder``."""
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        return {"size": usage.total, "free": usage.free}
    return None


def driver() -> str | None:
    """Version of NVIDIA's kernel driver; None without one."""
    with suppress(OSError, IndexError, StopIteration):
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
        return next(word for word in words if word[:1].isdigit() and "." in word)
    return None


def software() -> dict[str, str | None]:
    """Installed versions; None for packages that are not installed."""
    own = {"hpclm": __version__, "python": platform.python_version(), "interpreter": sys.executable}
    return own | {name: version(name) for name in LIBRARIES}


def version(package: str) -> str | None:
    """The installed version of a package; None without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def pytorch() -> Facts:
    """Versions, backends and GPUs that PyTorch sees; loads PyTorch."""
    import torch
    import torch.distributed as dist

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "backends": [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()],
        "architectures": torch.cuda.get_arch_list(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)],
    }


def _gpu(index: int) -> Facts:
    """One GPU, as PyTorch describes it."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "uuid": str(getattr(properties, "uuid", "")) or None,
        "capability": f"{properties.major}.{properties.minor}",
    }


def _device(device: "torch.device") -> Facts:
    """The device of a training process, and the versions of what drives it."""
    import torch

    facts: Facts = {"device": str(device), "torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type != "cuda":
        return facts | {"device_name": "CPU"}
    gpu = _gpu(torch.cuda.current_device() if device.index is None else device.index)
    free, total = torch.cuda.mem_get_info(device)
    used = max(0, total - free - torch.cuda.memory_reserved(device))
    facts |= {"device_name": gpu["name"], "uuid": gpu["uuid"], "nccl": _nccl()}
    return facts | {"device_total": total, "device_used": used}


def _nccl() -> str | None:
    import torch
    import torch.distributed as dist

    has_nccl = torch.version.cuda and dist.is_nccl_available()
    return ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None


def ask_program(*words: str, seconds: float = 5.0) -> Facts:
    """The first line that a program prints, and where the program is."""
    path = shutil.which(words[0])
    if not path:
        return {"error": f"{words[0]} is not in PATH"}
    try:
        status, output, errors = processes.ask(words, seconds)
    except NoAnswerError as error:
        return {"error": str(error), "path": path}
    lines = (output + errors).strip().splitlines() or [""]
    return {"error": lines[-1], "path": path} if status else {"says": lines[0], "path": path}
