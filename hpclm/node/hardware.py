"""The device of this process, its precision, its matrix products, and its peak performance."""

import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from hpclm.base.errors import ConfigError, HpclmError
from hpclm.base.terminal import many
from hpclm.config import EngineConfig
from hpclm.node import slurm, threads
from hpclm.node.gpus import kind_of_device

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {kind: name for name, kind in TYPES.items()}


def device(
    config: EngineConfig, local_rank: int, local_size: int = 1, env: Mapping[str, str] = os.environ
) -> torch.device:
    """Choose and set up the device of this process, one of ``local_size`` on its host.

    ConfigError if the settings ask for a device that does not exist, or the host has fewer GPUs than processes.
    """
    if threads.quota() < torch.get_num_threads() and not env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(threads.quota())  # PyTorch counts cores, and ignores the quota
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        _check_that_none_was_requested(config, env)
    if config.device == "cpu" or not gpus:
        keep_freed_memory()
        return torch.device("cpu")
    chosen = torch.device("cuda", gpu_of(local_rank, local_size, gpus, env.get("CUDA_VISIBLE_DEVICES")))
    use(chosen)
    if config.deterministic:
        use_deterministic_kernels()
    return chosen


def _check_that_none_was_requested(config: EngineConfig, env: Mapping[str, str]) -> None:
    """ConfigError or HpclmError if the settings, the job or CUDA_VISIBLE_DEVICES ask for a GPU."""
    if config.device == "cuda":
        raise ConfigError(next(config.problems_without_gpu()))
    if config.device == "cpu":
        return
    asked = slurm.asked_gpus(env)
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    if asked:
        why = f"this job asked Slurm for GPUs ({asked})"
    elif visible[:1].isalnum() and visible != "NoDevFiles":  # Slurm's word for none
        why = f"CUDA_VISIBLE_DEVICES={visible} names GPUs"
    else:
        return
    raise HpclmError(
        f"{why}, but PyTorch finds none on {socket.gethostname()}: see hpclm doctor there; "
        "engine.device=cpu trains on the CPU"
    )


def use(device: torch.device) -> None:
    """Make ``device`` the calling thread's current device.

    In PyTorch every thread starts with the first GPU, which may be another rank's. Pinning or allocating memory there opens a
    context of some hundred megabytes.
    """
    if device.type == "cuda" and device.index is not None:  # PyTorch refuses a device without a number
        torch.cuda.set_device(device)


def gpu_of(local_rank: int, local_size: int, gpus: int, visible: str | None) -> int:
    """The index of this process's GPU among the ``gpus`` that it sees; ConfigError if they are too few.

    ``visible``: CUDA_VISIBLE_DEVICES. A launcher may make a single GPU visible to each process; the preflight check detects
    processes that share a GPU.
    """
    if gpus >= local_size:
        return local_rank
    if gpus == 1 and visible:
        return 0
    raise ConfigError(
        f"{local_size} processes run on {socket.gethostname()}, but they see {many(gpus, 'GPU')} "
        f"(CUDA_VISIBLE_DEVICES={visible or ''}); start {gpus} on each node, ask for {local_size} GPUs (job.gpus), or use "
        "engine.device=cpu"
    )


def use_deterministic_kernels() -> None:
    """Make PyTorch use only deterministic kernels in this process. Call it before the first matrix product.

    cuBLAS reads its variable only once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # with warn_only, attention would keep its faster, inexact backward pass
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False  # needed only by code that reads uninitialized memory
    torch.backends.cudnn.benchmark = False


def compute_type(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The dtype of activations and matrix products."""
    if config.precision != "auto":
        return TYPES[config.precision]
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def problems_of_fp8(config: EngineConfig, device: torch.device) -> Iterator[str]:
    """An error for each reason why engine.fp8 cannot be used on ``device``."""
    if not config.fp8:
        return
    if compute_type(config, device) != torch.bfloat16:
        yield f"engine.fp8={config.fp8} needs bf16, and engine.precision=auto is fp32 here; set engine.precision=bf16"
    if device.type == "cuda":
        able = torch.cuda.get_device_capability(device) >= (8, 9) and not torch.version.hip
        if not able:
            yield (
                f"engine.fp8={config.fp8} needs an NVIDIA GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell), not "
                f"{torch.cuda.get_device_name(device)}; leave it out"
            )


def set_matmul(device: torch.device) -> str:
    """Let fp32 products run faster if they stay as precise; returns the choice and its reason, for the log."""
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        return "exact: TF32 would round fp32 products"
    exact = _product_error()
    torch.set_float32_matmul_precision("medium")
    fast = _product_error()
    if fast > 2 * exact + 1e-7:
        torch.set_float32_matmul_precision("highest")
        return f"exact; oneDNN is not used, since it would round products (relative error {fast:.0e})"
    return f"oneDNN, full precision (relative error {fast:.0e})"


def _product_error(size: int = 256) -> float:
    """The relative error of an fp32 matrix product, measured against fp64."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=draw) for _ in range(2))
    truth = a.double() @ b.double()
    return float(((a @ b).double() - truth).norm() / truth.norm())


def slow_type(device: torch.device, dtype: torch.dtype) -> str | None:
    """A hint that 16-bit types are slow on most CPUs; None for other devices and types."""
    if device.type != "cpu" or dtype == torch.float32:
        return None
    name = NAMES[dtype]
    return (
        f"many CPUs take 10 to 40 times as long for products in {name} as in fp32; compare with engine.precision=fp32"
    )


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak of dense 16-bit products on ``device`` in FLOP/s; None if unknown, and for fp32."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    kind = kind_of_device(torch.cuda.get_device_name(device))
    return kind.peak if kind else None


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the system, which saves a fifth of a CPU step."""
    with suppress(OSError, AttributeError):  # other C libraries lack it
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def describe(device: torch.device) -> str:
    """The device, for the log."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return f"CPU, {many(torch.get_num_threads(), 'thread')}"


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits for the device."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def peak_memory(device: torch.device) -> int:
    """The most memory that this process has used, in bytes: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return 0
