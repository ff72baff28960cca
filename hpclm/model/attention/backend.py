"""Chooses the kernel that computes attention on a GPU: cuDNN's, FlashAttention, FlexAttention or plain matrix products."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from importlib import util
from pathlib import Path

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend

from hpclm.config import ModelConfig
from hpclm.node import process_state

log = logging.getLogger(__name__)
CUDNN = SDPBackend.CUDNN_ATTENTION
FLASH = SDPBackend.FLASH_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
MATH = SDPBackend.MATH
NAMES = {CUDNN: "cuDNN", FLASH: "FlashAttention", EFFICIENT: "memory-efficient", MATH: "math"}
# on Hopper, FlashAttention 2 in place of cuDNN's kernels costs an estimated 7% of a step
CUDNN_FIRST = (CUDNN, FLASH, EFFICIENT, MATH)
FLASH_FIRST = (FLASH, CUDNN, EFFICIENT, MATH)
FAST_CUDNN = 91500  # from this version on, its kernels are the fastest on Hopper and later
WIDE_CUDNN = 92200  # from this version on, they support heads wider than 128
NARROWEST_FLEX = 16  # FlexAttention's kernels support no narrower heads
FLASH_3 = "flash_attn_interface"  # the package of FlashAttention 3, for Hopper
# FlashAttention 4, for Hopper and Blackwell: a package, and one of its files
FLASH_4 = ("flash_attn", "cute/interface.py")


@dataclass(frozen=True)
class KernelChoice:
    """Attention kernels in order of preference."""

    order: tuple[SDPBackend, ...]
    warning: str | None = None
    """The reason if the best kernel is not first."""
    flash: str | None = None
    """The implementation for PyTorch to use in place of its built-in FlashAttention 2."""

    def __str__(self) -> str:
        names = [
            f"{NAMES[FLASH]} {self.flash.removeprefix('FA')}" if b is FLASH and self.flash else NAMES[b]
            for b in self.order
        ]
        return names[0] if len(names) == 1 else f"{names[0]}, else {', '.join(names[1:])}"


def choose(
    model: ModelConfig, capability: tuple[int, int], cudnn: int | None, installed: Collection[str] = ()
) -> KernelChoice:
    """The kernels for a GPU of this compute capability, with this version of cuDNN (91500 is 9.15) and these FlashAttentions."""
    asked = model.attention.kernel
    flash = newest_flash(model, capability, installed)
    if asked == "math":
        return KernelChoice((MATH,))
    # FlashAttention 2 and cuDNN's kernels need Ampere
    if capability < (8, 0):
        too_old = f"model.attention.kernel={asked}: this GPU is too old for it" if asked in ("cudnn", "flash") else None
        return KernelChoice((EFFICIENT, MATH), too_old)
    wrong = refused(model, cudnn)
    if asked == "cudnn":
        return KernelChoice(CUDNN_FIRST, wrong and f"model.attention.kernel=cudnn: {wrong}", flash)
    # cuDNN's kernels are faster only from Hopper on
    if asked == "flash" or capability < (9, 0):
        return KernelChoice(FLASH_FIRST, flash=flash)
    if wrong:
        return KernelChoice(FLASH_FIRST, f"{wrong}; FlashAttention is used, which is slower here", flash)
    return KernelChoice(CUDNN_FIRST, flash=flash)


def newest_flash(model: ModelConfig, capability: tuple[int, int], installed: Collection[str]) -> str | None:
    """FA3 on Hopper; FA4 on Blackwell, and on Hopper without FA3; None: PyTorch's built-in FlashAttention 2."""
    if model.attention.dropout:  # neither supports dropout
        return None
    made_for = {"FA3": capability[0] == 9, "FA4": capability[0] in (9, 10) and model.head_width <= 128}
    return next((name for name, suits in made_for.items() if suits and name in installed), None)


def installed_flash() -> set[str]:
    """Which of FA3 and FA4 are installed; imports neither."""
    package, file = FLASH_4
    spec = util.find_spec(package)
    folders = getattr(spec, "submodule_search_locations", None) or ()
    present = {"FA3": util.find_spec(FLASH_3) is not None, "FA4": any(Path(at, file).is_file() for at in folders)}
    return {name for name, there in present.items() if there}


def refused(model: ModelConfig, cudnn: int | None) -> str | None:
    """The reason why cuDNN's attention cannot be used, or is slow; None if it is fine."""
    if cudnn is None:
        return "this PyTorch has no cuDNN"
    if model.attention.dropout * 16 % 1:
        return f"cuDNN's attention supports only multiples of 1/16 as model.attention.dropout, not {model.attention.dropout}"
    needed = WIDE_CUDNN if model.head_width > 128 else FAST_CUDNN
    if cudnn < needed:
        return (
            f"cuDNN {version(cudnn)} is older than {version(needed)}, which attention with heads of {model.head_width} needs "
            f"(an older one on LD_LIBRARY_PATH shadows PyTorch's own)"
        )
    return None


def version(number: int) -> str:
    """Format 91500 as 9.15."""
    return f"{number // 10000}.{number // 100 % 100}"


def use(model: ModelConfig, device: torch.device) -> KernelChoice | None:
    """Set the kernels for this process; None on a CPU, where plain matrix products are the only choice."""
    if device.type != "cuda":
        return prefer(KernelChoice((MATH,))) if model.attention.kernel == "math" else None
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return prefer(choose(model, torch.cuda.get_device_capability(device), cudnn, installed_flash()))


def prefer(choice: KernelChoice) -> KernelChoice:
    """Let scaled_dot_product_attention use the first of these kernels that supports its arguments; returns ``choice``, or a fallback."""
    order = attention.sdpa_kernel(list(choice.order), set_priority=True)
    order.__enter__()
    process_state.undo_later(partial(order.__exit__, None, None, None))
    if choice.flash:
        try:
            attention.activate_flash_attention_impl(choice.flash)
            process_state.undo_later(attention.restore_flash_attention_impl)
        except Exception as error:  # built for another PyTorch or CUDA, it may raise anything
            why = str(error).partition("\n")[0] or repr(error)
            log.warning("FlashAttention %s is installed but cannot be used: %s", choice.flash.removeprefix("FA"), why)
            return replace(choice, flash=None)
    return choice


def flexible(model: ModelConfig, compiled: bool, device: torch.device, masked: bool) -> bool:
    """Whether FlexAttention computes attention, in compiled blocks on GPUs. ``masked``: documents, windows or biases exist, so other
    kernels would need a length x length mask. Only FlexAttention caps scores and supports sinks."""
    masked = masked or model.attention.score_cap is not None or model.attention.sinks
    asked = model.attention.kernel == "flex" or (model.attention.kernel == "auto" and masked)
    able = model.head_width >= NARROWEST_FLEX and not model.attention.dropout
    return asked and able and compiled and device.type == "cuda"
