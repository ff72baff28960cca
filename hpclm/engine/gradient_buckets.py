"""Gradients in a few flat fp32 buckets, which are reduced over the replicas during the backward pass of the last micro-batch.

This is what DistributedDataParallel does (Li et al. 2020), without the compiler stack that it loads into every process.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpclm.parallel.mesh import Axis, Mesh

FIRST = 1 << 20  # bytes of the first bucket; small, so that the first all-reduce starts early (as in PyTorch)
SIZE = 25.0  # megabytes of the others (as in PyTorch)
PER_REPLICA = 4.0  # megabytes a replica on several nodes: a million fp32 gradients (as in Megatron-LM)
FEWEST = 4  # buckets on several nodes, so that most of the communication overlaps with the backward pass


class Bucket:
    """A flat buffer, and the parameters whose gradients are views of it."""

    def __init__(self, parameters: Sequence[nn.Parameter], size: int | None = None):
        """``size``: values of the buffer; None: as many as the parameters have."""
        self.parameters = tuple(parameters)
        first, size = parameters[0], size or sum(p.numel() for p in parameters)
        self.buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.waiting = len(parameters)
        """Parameters whose gradients are not ready yet."""
        self.work: Any = None
        self.sent = self.buffer
        """What is all-reduced: the buffer, or a copy of it in a smaller type."""
        for parameter, view in zip(parameters, self.views(), strict=True):
            parameter.grad = view

    def views(self) -> Iterator[Tensor]:
        """The gradient of each parameter, as a view of the buffer."""
        parts = self.buffer.split([p.numel() for p in self.parameters])
        return (part.view_as(p) for part, p in zip(parts, self.parameters, strict=True))


class GradientBuckets:
    """All gradients of one replica, in buckets that are all-reduced over ``axis``."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        leaves: Mapping[nn.Parameter, nn.Parameter],
        axis: Axis,
        dtype: torch.dtype = torch.float32,
    ):
        """``leaves``: each parameter with an fp32 gradient, and the parameter of the model whose backward pass completes it.
        ``dtype``: in which they are sent and summed."""
        self.axis, self.reducing, self.dtype, self.buckets = axis, True, dtype, buckets
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                leaves[parameter].register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._ready(bucket))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside this context, backward passes accumulate gradients locally."""
        self.reducing = False
        try:
            yield
        finally:
            self.reducing = True

    def finish(self) -> None:
        """After the last backward pass: wait until all gradients are reduced."""
        for bucket in self.buckets:
            if bucket.work is None:  # some of its parameters were unused
                self._reduce(bucket)
        for bucket in self.buckets:
            bucket.work.wait()
            if bucket.sent is not bucket.buffer:
                bucket.buffer.copy_(bucket.sent)
            bucket.sent = bucket.buffer
            bucket.work, bucket.waiting = None, len(bucket.parameters)

    def zero(self) -> None:
        """Zero all gradients in place; also cleans up after an abandoned step."""
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.sent = bucket.buffer
            bucket.work, bucket.waiting = None, len(bucket.parameters)
            bucket.buffer.zero_()

    def _ready(self, bucket: Bucket) -> None:
        if self.reducing:
            bucket.waiting -= 1
            if not bucket.waiting:
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.sent = bucket.buffer.to(self.dtype)
        bucket.work = dist.all_reduce(bucket.sent, group=self.axis.group, async_op=True)


def megabytes(given: float | None, values: int, mesh: Mesh, device: torch.device) -> float:
    """Size of the buckets of ``values`` gradients: as ``given``, or chosen.

    A ring over n replicas sends a bucket in n parts, so over the network of several nodes its size must grow with n, or the
    latency of each part takes longer than its transfer. CPUs, where the order of sums depends on the size, keep one size.
    """
    if given or mesh.nodes == 1 or device.type != "cuda":
        return given or SIZE
    return max(SIZE, min(PER_REPLICA * mesh.dp.size, values * 4 / (1 << 20) / FEWEST))


def groups(parameters: Sequence[nn.Parameter], size_mb: float) -> Iterator[list[nn.Parameter]]:
    """Parameters from last to first, the order of the backward pass, in buckets of about ``size_mb`` megabytes."""
    found: list[nn.Parameter] = []
    limit = int(size_mb * (1 << 20))
    size, most = 0, min(FIRST, limit)
    for parameter in reversed(parameters):
        bytes_ = parameter.numel() * parameter.element_size()
        if found and size + bytes_ > most:
            yield found
            found, size, most = [], 0, limit
        found.append(parameter)
        size += bytes_
    if found:
        yield found
