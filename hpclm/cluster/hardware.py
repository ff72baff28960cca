"""What this process computes on: device, precision, how matrix products run, and how fast the device could be."""

import ctypes
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from hpclm.cluster.kinds import peak_of
from hpclm.config import EngineConfig
from hpclm.errors import ConfigError

log = logging.getLogger(__name__)

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device(
    config: EngineConfig, local_rank: int, local_size: int = 1, env: Mapping[str, str] = os.environ
) -> torch.device:
    """The device of this process, one of ``local_size`` on its host, made ready.

    ConfigError when the settings want one that is not there, or when there are fewer GPUs than processes.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and not gpus:
        raise ConfigError(next(config.problems_without_gpu()))
    if config.device == "cpu" or not gpus:
        keep_freed_memory()
        return torch.device("cpu")
    chosen = torch.device("cuda", gpu_of(local_rank, local_size, gpus, env.get("CUDA_VISIBLE_DEVICES")))
    torch.cuda.set_device(chosen)
    return chosen


def gpu_of(local_rank: int, local_size: int, gpus: int, visible: str | None) -> int:
    """Which of the ``gpus`` that this process sees is its own; ConfigError when they do not suffice.

    A launcher may show each process one GPU of its own (``visible`` is CUDA_VISIBLE_DEVICES); whether it is the same for
    all, the preflight check finds.
    """
    if gpus >= local_size:
        return local_rank
    if gpus == 1 and visible:
        return 0
    shown = f"CUDA_VISIBLE_DEVICES={visible}" if visible else "CUDA_VISIBLE_DEVICES is not set"
    raise ConfigError(
        f"{local_size} processes run on {socket.gethostname()}, but there {'is' if gpus == 1 else 'are'} {gpus} "
        f"GPU{'s' * (gpus != 1)} for them ({shown}); start {gpus} on each node, ask for {local_size} GPUs (job.gpus), or use "
        f"engine.device=cpu"
    )


def pci_address(device: torch.device) -> str | None:
    """Where the device is on the machine's buses, as 0000:17:00.0; None for a CPU, or where PyTorch does not say."""
    if device.type != "cuda":
        return None
    facts: Any = torch.cuda.get_device_properties(device)
    with suppress(AttributeError):
        return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    return None


def compute_type(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Type of activations and matrix products."""
    if config.precision != "auto":
        return TYPES[config.precision]
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def set_matmul(config: EngineConfig, device: torch.device) -> str:
    """Choose how fp32 products run in this process; says what was chosen and why."""
    torch.set_float32_matmul_precision("highest")
    if config.matmul == "exact":
        return "exact, as set"
    if config.matmul == "fast":
        torch.set_float32_matmul_precision("high" if device.type == "cuda" else "medium")
        return "fast, as set"
    if device.type == "cuda":
        return "exact: TF32 would round fp32 products"
    exact = _product_error()
    torch.set_float32_matmul_precision("medium")
    fast = _product_error()
    if fast > 2 * exact + 1e-7:
        torch.set_float32_matmul_precision("highest")
        return f"exact: oneDNN would round fp32 products here (relative error {fast:.0e})"
    return f"fast: oneDNN, with fp32's precision here (relative error {fast:.0e})"


def _product_error(size: int = 256) -> float:
    """Relative error of one fp32 product against fp64."""
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(size, size, generator=draw), torch.randn(size, size, generator=draw)
    truth = a.double() @ b.double()
    return float(((a @ b).double() - truth).norm() / truth.norm())


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense peak of 16-bit products on this device in FLOP/s; None where it is not known."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    return peak_of(torch.cuda.get_device_name(device))


def keep_freed_memory() -> None:
    """Let glibc keep what tensors free, instead of giving it back and faulting it in again; a fifth of a CPU step."""
    with suppress(OSError, AttributeError):  # another C library: nothing to tune
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return f"CPU, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits for the device."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held: on the GPU, or resident on a CPU machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return 0
