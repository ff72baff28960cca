"""Keeps activations in pinned CPU memory between the forward and the backward pass, copied on separate streams.

While a block computes, the activations of the previous block are copied to the CPU. In the backward pass, the activations of the next
block to run are copied back. The GPU holds the activations of AHEAD blocks at a time, and the host never waits.

Whole storages are copied, each once. So views, such as the slices of the fused projection, keep their strides, on which compiled backward
passes rely, and are copied without a contiguous buffer in between.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

MIN_OFFLOADED_VALUES = 1 << 16  # smaller activations are not worth offloading
AHEAD = 2
"""Maximum number of blocks with activations on the GPU: the one that computes and the one that is copied."""


class Streams:
    """Streams of a GPU for copies to the CPU and back."""

    def __init__(self, device: torch.device):
        self.out: Any = torch.cuda.Stream(device)
        self.back: Any = torch.cuda.Stream(device)

    def computing(self) -> Any:
        """The stream of the current operations."""
        return torch.cuda.current_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue copies on ``stream`` inside this context."""
        return torch.cuda.stream(stream)


@dataclass(eq=False)
class BlockActivations:
    """The activations of one block in one micro-batch."""

    number: int
    saved: dict[tuple[int, int, torch.dtype], "weakref.ref[Saved]"] = field(default_factory=dict)
    """By address and version; a reference is dead once the backward pass no longer needs it."""
    copied: Any = None
    """Event: all activations are on the CPU."""
    fetched: bool = False


@dataclass(eq=False)
class Saved:
    """The storage of activations, [values], on the CPU and temporarily also on the GPU."""

    block: BlockActivations
    copy: Tensor
    streams: Streams
    device: torch.device
    version: int
    tensor: Tensor | None
    """The tensor on the GPU."""
    arriving: Any = None
    """Event: the copy is back on the GPU; None once the computing stream has waited for it."""

    def arrived(self) -> None:
        """Make the computing stream wait until the copy is back."""
        if self.arriving is not None:
            self.streams.computing().wait_event(self.arriving)
            self.arriving = None

    def __del__(self) -> None:
        self.arrived()  # otherwise a pending copy could overwrite the new owner of its memory


class ActivationOffload:
    """Moves the tensors that the blocks of one micro-batch save for the backward pass."""

    def __init__(self, streams: Streams, small: int = MIN_OFFLOADED_VALUES):
        self.streams = streams
        self.small = small
        self.blocks: list[BlockActivations] = []

    @contextmanager
    def next_block(self) -> Iterator[None]:
        """Tensors saved for the backward pass inside this context belong to the next block; weights stay on the device."""
        number = len(self.blocks)
        if number >= AHEAD:
            self._leave(self.blocks[number - AHEAD])
        block = BlockActivations(number)
        self.blocks.append(block)
        with saved_tensors_hooks(lambda tensor: self._pack(tensor, block), self._unpack):
            yield
        block.copied = self.streams.out.record_event()

    def _leave(self, block: BlockActivations) -> None:
        """Free the GPU's memory for later operations on the computing stream, once the copies are done."""
        self.streams.computing().wait_event(block.copied)
        for saved in alive(block):
            saved.tensor = None

    def _pack(self, tensor: Tensor, block: BlockActivations) -> Any:
        if tensor.numel() < self.small or not tensor.is_floating_point() or is_weight(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor._version, tensor.dtype
        saved = block.saved[key]() if key in block.saved else None
        if saved is None:
            out = self.streams.out
            there = tensor.detach()  # shares the version counter of its base
            whole = there.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            copy = torch.empty_like(whole, device="cpu", pin_memory=tensor.is_cuda)
            # the copy may start only after the kernels that write the activation
            out.wait_stream(self.streams.computing())
            with self.streams.on(out):
                copy.copy_(whole, non_blocking=True)
            saved = Saved(block, copy, self.streams, tensor.device, whole._version, whole)
            block.saved[key] = weakref.ref(saved)
        return saved, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> Any:
        if isinstance(packed, Tensor):
            return packed
        saved, *view = packed
        if saved.tensor is not None and saved.tensor._version != saved.version:
            raise RuntimeError(
                "an activation was changed in place while it was being offloaded; remove engine.offload_activations"
            )
        for number in range(saved.block.number, max(-1, saved.block.number - AHEAD), -1):
            self._fetch(self.blocks[number])
        saved.arrived()
        return saved.tensor.as_strided(*view)

    def _fetch(self, block: BlockActivations) -> None:
        """Start to copy the activations of a block back to the GPU, unless they are still there."""
        if block.fetched:
            return
        block.fetched = True
        back = self.streams.back
        missing = [saved for saved in alive(block) if saved.tensor is None]
        # allocated on the computing stream, which can later reuse the memory without waiting for ``back``
        for saved in missing:
            saved.tensor = torch.empty_like(saved.copy, device=saved.device)
        back.wait_stream(self.streams.computing())
        # the activations must have arrived on the CPU first
        back.wait_event(block.copied)
        for saved in missing:
            assert saved.tensor is not None
            with self.streams.on(back):
                saved.tensor.copy_(saved.copy, non_blocking=True)
            saved.version = saved.tensor._version
            saved.arriving = back.record_event()


def alive(block: BlockActivations) -> list[Saved]:
    """The storages of a block that the backward pass may still need."""
    storages = (reference() for reference in block.saved.values())
    return [storage for storage in storages if storage is not None]


def is_weight(tensor: Tensor) -> bool:
    """Whether this is a parameter, or a cast or transposed parameter."""
    if tensor.grad_fn is None:
        return tensor.requires_grad
    node: Node | None = tensor.grad_fn
    # at most a cast and a transposition lie between an activation's node and the weight's
    for _ in range(3):
        if node is None or node.name().endswith("AccumulateGrad"):
            break
        inputs = node.next_functions
        node = inputs[0][0] if len(inputs) == 1 else None
    return node is not None and node.name().endswith("AccumulateGrad")
