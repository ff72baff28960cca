"""A GPU that is not there: tensors on PyTorch's meta device that say they are on cuda:0, and process groups without peers.

Code that asks ``x.is_cuda`` or passes ``device="cuda"`` takes the path it would take on a GPU. Nothing is computed: a number
that the code reads back from the device is 1; a byte, or whether there is *any*, is 0: so DeepSpeed asks for overflows.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

CUDA = torch.device("cuda", 0)
META = torch.device("meta")
_is_meta: Callable[[Tensor], bool] = vars(torch._C.TensorBase)["is_meta"].__get__
_device_of: Callable[[Tensor], torch.device] = torch._C.TensorBase.device.__get__
SEEDS = tuple(f"torch.{name}" for name in ("manual_seed", "cuda.manual_seed", "cuda.manual_seed_all")) + (
    "torch.set_rng_state",
    "torch.cuda.set_rng_state",
)
ANSWERS: dict[str, Any] = dict(
    is_available=True, is_current_stream_capturing=False, is_initialized=True, current_device=0, device_count=1, set_device=None, is_bf16_supported=True, get_device_capability=(9, 0),
    memory_allocated=0, max_memory_allocated=0, memory_reserved=0, max_memory_reserved=0, empty_cache=None,
    reset_peak_memory_stats=None, reset_max_memory_allocated=None, get_rng_state=torch.zeros(16, dtype=torch.uint8), memory_stats={},
)  # fmt: skip
"""What functions of torch.cuda answer."""
FSDP2 = "_fsdp_param.py"
"""PyTorch's file that shards a weight."""
SIZED_DROPOUT = 16
"""cuDNN's attention has dropout probabilities that are multiples of 1 / 16."""


class Observer(Protocol):
    """What happens besides operations on tensors."""

    inside: int
    """More than 0 while an operation runs: PyTorch's own code must then see the meta device."""

    def wait(self, what: str) -> None:
        """The host waits for the device."""

    def seed(self, what: str) -> None:
        """A random generator is seeded."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose operations torch.compile would fuse."""


class PretendedGPU(TorchFunctionMode):
    """Redirects cuda to the meta device, and attention to the kernel that a GPU would run."""

    def __init__(self, observer: Observer):
        super().__init__()
        self.observer = observer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``function`` on the meta device."""
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        if function in (torch.tensor, torch.as_tensor) and redirected((kwargs or {}).get("device")) == META:
            self.observer.wait("copy to the device")
        kwargs = {name: redirected(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if function is Tensor.tolist and args[0].is_meta:
            self.observer.wait("tolist")
            return torch.ones(args[0].shape, device="cpu").tolist()
        if (
            function is Tensor.backward
        ):  # otherwise the backward pass, and what it recomputes, would run outside this mode
            with self:
                return torch.autograd.backward(args[0], kwargs.pop("gradient", None), **kwargs)
        if function is Tensor.cuda:
            return args[0].to(META)
        return function(*map(redirected, args), **kwargs)


def redirected(value: Any) -> Any:
    """``value``, or the meta device if it is a GPU."""
    if isinstance(value, torch.device):
        return META if value.type == "cuda" else value
    return META if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel of scaled_dot_product_attention on a recent GPU: cuDNN's, or FlashAttention 2 where cuDNN has no such dropout."""
    aten: Any = torch.ops.aten
    if attn_mask is None and dropout_p * SIZED_DROPOUT % 1:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # PyTorch turns it into what is added to the scores
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    return aten._scaled_dot_product_cudnn_attention(q, k, v, attn_mask, True, dropout_p, is_causal, False, scale=scale)[
        0
    ]


def flex_attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """FlexAttention, which moves the same bytes as FlashAttention and computes at most its causal half."""
    aten: Any = torch.ops.aten
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)[0]


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """A layer norm, which moves the same bytes in the same kernels as the fused rms_norm of a GPU.

    On the meta device PyTorch would take rms_norm apart.
    """
    aten: Any = torch.ops.aten
    return aten.native_layer_norm(x, list(shape), weight, None, eps or 1e-6)[0]


class Stream:
    """A CUDA stream or event on which nothing is ever queued; all are equal."""

    device, device_index, cuda_stream = CUDA, 0, 0

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def record_event(self, event: Any = None) -> "Stream":
        """An event on this stream."""
        return self

    def query(self) -> bool:
        """Whether all is done."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds to another event."""
        return 1.0

    def wait_stream(self, *others: Any) -> None:
        """Queue a dependency; the host does not wait."""

    wait_event = record = record_stream = wait = wait_stream


@contextmanager
def gpu(observer: Observer) -> Iterator[None]:
    """Inside this context there is a GPU, as far as Python code can see."""

    def device(tensor: Tensor) -> torch.device:
        found = _device_of(tensor)
        return CUDA if found.type == "meta" and not observer.inside else found

    def is_meta(tensor: Tensor) -> bool:
        # FSDP2 does not adopt the memory that weights are given while they are on the meta device
        return _is_meta(tensor) and not sys._getframe(1).f_code.co_filename.endswith(FSDP2)

    def counted(name: str) -> Callable[..., Any]:
        def seeded(*args: Any, **kwargs: Any) -> Any:
            observer.seed(name)
            return torch.default_generator

        return seeded

    def compile_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        module.forward = observer.compiled(module.forward)
        module._compiled_call_impl = module._call_impl

    def compile_function(function: Any = None, **kwargs: Any) -> Any:
        if function is None:
            return lambda function: compile_function(function)
        if isinstance(function, nn.Module):
            compile_module(function)
            return function
        return observer.compiled(function)

    class Watched(Stream):
        def synchronize(self) -> None:
            observer.wait("synchronize")

    replaced: dict[str, Any] = {name: counted(name) for name in SEEDS}
    replaced |= {f"torch.cuda.{name}": Watched for name in ("Stream", "Event")}
    stream = Watched()
    replaced |= {f"torch.cuda.{name}": lambda *_, **__: stream for name in ("current_stream", "default_stream")}
    replaced["torch.cuda.stream"] = lambda *_, **__: nullcontext()
    for name, answer in ANSWERS.items():
        replaced[f"torch.cuda.{name}"] = lambda *_, answer=answer, **__: answer
    replaced["torch.cuda.get_device_properties"] = lambda *_: SimpleNamespace(total_memory=1 << 37, name="GPU")
    replaced["torch.cuda.default_generators"] = (SimpleNamespace(manual_seed=counted("torch.cuda.default_generators")),)
    for name in ("range_push", "range_pop", "mark"):
        replaced[f"torch.cuda.nvtx.{name}"] = lambda *_: None
    replaced["torch.cuda.synchronize"] = lambda *_: observer.wait("synchronize")
    replaced["torch.nn.functional.rms_norm"] = rms_norm
    replaced["torch.nn.functional.scaled_dot_product_attention"] = attention
    flex = "torch.nn.attention.flex_attention"
    replaced[f"{flex}.flex_attention"], replaced[f"{flex}.create_block_mask"] = flex_attention, lambda *_, **__: None
    replaced["torch.compile"], replaced["torch.nn.Module.compile"] = compile_function, compile_module
    with ExitStack() as opened:
        for name, value in replaced.items():
            opened.enter_context(mock.patch(name, value))
        for name, getter in (
            ("device", device),
            ("is_cuda", lambda tensor: device(tensor).type == "cuda"),
            ("is_meta", is_meta),
        ):
            opened.enter_context(mock.patch.object(Tensor, name, property(getter), create=True))
        opened.enter_context(mock.patch.object(Tensor, "record_stream", lambda *_: None, create=True))
        opened.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor, *_: tensor))
        opened.enter_context(torch.autograd.set_multithreading_enabled(False))
        opened.enter_context(PretendedGPU(observer))
        yield


@contextmanager
def ranks(rank: int, size: int) -> Iterator[None]:
    """Inside this context PyTorch's process group is that of rank ``rank`` out of ``size``, whose peers do not exist."""
    if size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def finished_work() -> Any:
    """What a collective returns: work that is done."""
    return FakeWork().boxed()
