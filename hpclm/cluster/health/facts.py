"""What a process has: host, device, versions and limits, as plain values that can be gathered and compared."""

import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm import __version__
from hpclm.cluster.health import processes

if TYPE_CHECKING:
    import torch

Facts = dict[str, Any]
"""What one process found: JSON-able."""

SHM = Path("/dev/shm")


def node_name(launcher: str, env: Mapping[str, str] = os.environ) -> str:
    """This machine as its scheduler calls it, else by its host name.

    HOSTNAME is that of the machine the job's script runs on, and under mpirun so may be SLURMD_NODENAME.
    """
    return (launcher == "Slurm" and env.get("SLURMD_NODENAME")) or socket.gethostname()


def here(launcher: str, device: "torch.device", env: Mapping[str, str] = os.environ) -> Facts:
    """What this process has, at this moment."""
    return {
        "time": time.time(),
        "node": node_name(launcher, env),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": processes.machine(),
        "hpclm": __version__,
        "python": platform.python_version(),
        **gpu(device),
        "visible": env.get("CUDA_VISIBLE_DEVICES"),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "memory_free": memory_free(),
        "shm": shared_memory(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def gpu(device: "torch.device") -> Facts:
    """Device, and the versions of what drives it."""
    import torch

    from hpclm.cluster import hardware

    found: Facts = {"device": str(device), "torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type != "cuda":
        return found | {"device_name": "CPU"}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return found | {
        "device_name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")) or None,
        "pci": hardware.pci_address(device),
        "device_total": total,
        "device_used": max(0, total - free - torch.cuda.memory_reserved(device)),
        "driver": driver(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
    }


def driver() -> str | None:
    """Version of NVIDIA's kernel driver; None where there is none."""
    with suppress(OSError, IndexError):
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
        return next(word for word in words if word[:1].isdigit() and "." in word)
    return None


def memory_free() -> int | None:
    """Bytes of memory that can be had without swapping."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return None


def shared_memory() -> Facts | None:
    """Bytes of /dev/shm, and how many are free."""
    with suppress(OSError):
        usage = shutil.disk_usage(SHM)
        return {"size": usage.total, "free": usage.free}
    return None
