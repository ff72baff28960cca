"""Simulate one rank of a cluster without GPUs, with PyTorch's fake tensors, fake process group and memory tracker.

Engines run as on ``cuda:0``. PyTorch has fake CUDA tensors only in a CUDA build, so this file uses fake CPU tensors. Requests for
``cuda`` get the CPU, `is_cuda` is true, and streams are the empty streams of ``torch.cpu``. Only this file uses non-public parts of
PyTorch.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpclm.model.own_block import HOOKS
from hpclm.model.stack import Stack

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
MEMORY = 128 * 2**30
"""Bytes of memory of the fake GPU; it determines the tokens per chunk of the loss."""
aten: Any = torch.ops.aten

Collective = tuple[str, tuple[int, ...]]
"""Kind of a collective, and the global ranks of its group."""


class CallCounter(TorchDispatchMode):
    """Counts collectives and the host's waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Collective] = Counter()
        self.bytes: Counter[Collective] = Counter()
        """Bytes of each collective's largest tensor, summed."""
        self.waits = 0
        self._queued = False
        """Whether work has been queued on the device since the last wait."""

    def restart(self) -> None:
        """Set all counts to 0."""
        self.calls.clear()
        self.bytes.clear()
        self.waits = 0

    def wait(self, *_: Any) -> None:
        """Count a wait of the host, unless the device has nothing to do."""
        self.waits += self._queued
        self._queued = False

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is aten._local_scalar_dense.default:  # item(), tolist(), bool()
            self.wait()
            return _value(args[0])
        self._queued |= not operation.is_view and operation.namespace != "prim"
        if operation in collective_ops and operation not in sync_ops:
            ranks = dist.get_process_group_ranks(CollectiveOp.get_process_group(operation, args))
            key = operation._schema.name.split("::")[1].strip("_").removesuffix("_base"), tuple(ranks)
            self.calls[key] += 1
            self.bytes[key] += max(sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, Tensor)) for arg in args)
        return operation(*args, **kwargs or {})


def _value(scalar: Tensor) -> float:
    """The value that the host reads from a fake tensor: 0, but 1 for a loss and for an int32. PyTorch's pipeline stages exchange an int32
    to agree that they know the shapes of what they receive."""
    return 1.0 if scalar.is_floating_point() else int(scalar.dtype == torch.int32)


class OnTheCPU(TorchFunctionMode):
    """Redirects requests for a GPU to the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.device:
            return function(*args, **kwargs or {})
        if function in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if function in HOOKS and not args[0].requires_grad:  # the memory tracker does that to frozen weights
            return SimpleNamespace(remove=lambda: None)
        given = {name: _on_the_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*map(_on_the_cpu, args), **given)


def _on_the_cpu(value: Any) -> Any:
    device = torch.device(value) if isinstance(value, str) and value.startswith("cuda") else value
    return CPU if isinstance(device, torch.device) and device.type == "cuda" else value


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention as on a GPU, where no kernel keeps the scores; FlashAttention, or cuDNN's with a mask."""
    if attn_mask is None:
        if q.shape[-1] != v.shape[-1]:  # which FlashAttention 2 does not support
            return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, is_causal, scale=scale)[
                0
            ]
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    args = (q, k, v, attn_mask, True, dropout_p, is_causal, False)
    return aten._scaled_dot_product_cudnn_attention(*args, scale=scale)[0]


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """A single operation, as on a GPU, that saves the same tensors."""
    return aten.native_layer_norm(x, list(shape), weight, None, eps or 1e-6)[0]


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout as on a GPU, with a mask of one byte per value."""
    return aten.native_dropout(x, p, training)[0]


def evenly(counter: CallCounter, counts: Tensor, rows: int) -> Any:
    """Row counts of experts for the host: fake tensors have no values, so every expert gets equally many rows."""
    counter.wait()
    *outer, parts = counts.shape
    even = [rows // parts + (part < rows % parts) for part in range(parts)]
    return [even] * outer[0] if outer else even


@contextmanager
def fake_gpu(rank: int, world: int) -> Iterator[CallCounter]:
    """Inside this context, PyTorch behaves as on rank ``rank`` of ``world``, with a GPU that computes nothing."""
    counter = CallCounter()
    with ExitStack() as opened:
        if world > 1:
            dist.init_process_group("fake", rank=rank, world_size=world)
            opened.callback(dist.destroy_process_group)
        for name, value in _replacements(counter).items():
            opened.enter_context(mock.patch(f"torch.{name}", value))
        opened.enter_context(mock.patch.object(Tensor, "is_cuda", property(lambda tensor: True), create=True))
        opened.enter_context(torch.autograd.set_multithreading_enabled(False))
        for user in ("parallel.dispatch", "model.expert_mlp"):
            opened.enter_context(mock.patch(f"hpclm.{user}.on_host", partial(evenly, counter)))
        for mode in (FakeTensorMode(allow_non_fake_inputs=True), counter, OnTheCPU()):
            opened.enter_context(mode)
        yield counter


def _replacements(counter: CallCounter) -> dict[str, Any]:

    class Event(torch.cpu.Event):
        def __init__(self, *_: Any, **__: Any):
            """Accepts and ignores timing."""

        def synchronize(self) -> None:
            counter.wait()

        def elapsed_time(self, other: Any) -> float:
            return 0.0

    def from_group(*args: Any, **kwargs: Any) -> DeviceMesh:
        with unset_fake_temporarily():  # a mesh needs the real ranks
            return mesh_from_group(*(value if value != "cuda" else "cpu" for value in args), **kwargs)

    def all_gather_object(gathered: list[Any], value: Any, group: Any = None) -> None:
        gathered[:] = [value] * len(gathered)

    mesh_from_group: Callable[..., DeviceMesh] = DeviceMesh.from_group
    properties = SimpleNamespace(total_memory=MEMORY, name="fake GPU", major=9, minor=0)
    return {
        # the originals ask the driver
        "cuda.is_available": lambda: True,
        "cuda.get_device_properties": lambda *_: properties,
        "cuda.get_rng_state": lambda *_: torch.get_rng_state(),
        # a build without CUDA lacks these classes
        "cuda.Event": Event,
        "cuda.Stream": torch.cpu.Stream,
        "cuda.current_stream": torch.cpu.current_stream,
        "cuda.stream": torch.cpu.stream,
        "cuda.synchronize": counter.wait,
        # on a CPU, the originals save other tensors than on a GPU, or decompose differently
        "nn.functional.scaled_dot_product_attention": attention,
        "nn.functional.rms_norm": rms_norm,
        "nn.functional.dropout": dropout,
        # fake tensors have no values to send or look up, and cannot be a CausalBias
        "distributed.device_mesh.DeviceMesh.from_group": from_group,
        "distributed.all_gather_object": all_gather_object,
        "nn.attention.bias.causal_lower_right": lambda *_: None,
        # a module is already on the device
        "nn.Module.to": lambda module, *_, **__: module,
    }


def peak_memory(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Iterable[Tensor], step: Callable[[], None]
) -> dict[str, int]:
    """Bytes of each part of PyTorch's MemTracker at the memory peak of ``step``. ``others``: further tensors that exist before it."""
    tracker = MemTracker()
    weights = nn.ParameterList(weight for group in optimizer.param_groups for weight in group["params"])
    tracker.track_external(model, weights, optimizer, *others)

    def forget(
        stage: nn.Module,
    ) -> (
        None
    ):  # the tracker refuses to enter a module twice; only this stage, because others still wait for a backward pass
        for module in stage.modules():
            tracker.memory_tracking.pop(module, None)

    with _before_each_micro_batch(model, forget), tracker, warnings.catch_warnings():
        # it looks at gradients that hooks have already taken
        warnings.filterwarnings("ignore", "Expected a tensor or a traceable wrapper-subclass", UserWarning)
        step()
    return tracker.get_tracker_snapshot("peak")[CPU]


@contextmanager
def _before_each_micro_batch(model: nn.Module, call: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``call`` with a module before each of its forward passes: ``model``, one of its pipeline stages or a wrapper."""
    layers = {layer for stage in model.modules() if isinstance(stage, Stack) for layer in stage.layers.modules()}
    running = 0

    def begin(module: nn.Module, *_: Any) -> None:
        nonlocal running
        if module not in layers:
            if not running:
                call(module)
            running += 1

    def end(module: nn.Module, *_: Any) -> None:
        nonlocal running
        running -= module not in layers

    hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
