"""Gradients in a few flat buffers. Each is all-reduced as soon as the last backward pass of a step has filled it and all earlier buckets.

This is DistributedDataParallel's method (Li et al. 2020), without the compiler stack that it loads into every process. It also works for
pipelines, which mix forward and backward passes of many micro-batches. As in DistributedDataParallel, buckets are sent in one
fixed order, although compiled blocks fill them in another. Ranks that started collectives in different orders would hang or add
gradients of different weights.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpclm.parallel.mesh import Axis, Compute

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the first all-reduce starts early (as in PyTorch)
BUCKET_MB = 25.0  # megabytes of later buckets (as in PyTorch)
MB_PER_REPLICA = 4.0  # megabytes a replica on several nodes: a million fp32 gradients (as in Megatron-LM)
MIN_BUCKETS = 4  # buckets on several nodes, so that most of the communication overlaps with the backward pass


class Bucket:
    """A flat buffer, and the parameters that have views of it as gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, starts: Sequence[int] = (), size: int = 0):
        """``axis``: the ranks that sum the gradients. ``starts``: each gradient's offset in the buffer of ``size`` values; by default,
        gradients follow each other without gaps."""
        self.axis = axis
        sizes = [p.numel() for p in parameters]
        self.parameters = tuple(parameters)
        self.starts = starts or [0, *accumulate(sizes[:-1])]
        self.buffer = parameters[0].new_zeros(size or sum(sizes), requires_grad=False)
        self.missing = 0
        """Gradient additions still to come in this step; 0 outside a step."""
        self.work: Any = None
        self.sent = self.buffer
        """The tensor to all-reduce: the buffer, or a copy in a smaller type."""
        self.summed = slice(None)
        """The part of the buffer that receives the sums."""
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            # autograd accumulates into an existing gradient, so the buffer fills without a copy
            parameter.grad = view(self.buffer, parameter, start)


def view(buffer: Tensor, parameter: nn.Parameter, start: int) -> Tensor:
    """A view of a parameter's part of a flat buffer, in its shape."""
    return buffer[start : start + parameter.numel()].view_as(parameter)


class GradientBuckets:
    """All gradients of one replica, in buckets that are all-reduced over the ranks with the same weights."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        leaves: Mapping[nn.Parameter, nn.Parameter],
        dtype: torch.dtype = torch.float32,
        late: Collection[nn.Parameter] = (),
    ):
        """``leaves``: parameter with an fp32 gradient -> the model's parameter that completes it in the backward pass.
        ``dtype``: the type of gradients when they are sent and summed. ``late``: parameters with gradients that change after the
        backward passes; finish() reduces their buckets."""
        self.dtype = dtype
        place = {parameter: number for number, parameter in enumerate(leaves)}
        self.buckets = sorted(buckets, key=lambda bucket: -min(place[p] for p in bucket.parameters))
        """In the order of sending, which is the same on all ranks: backward passes fill the last layer's bucket first."""
        self._sent = len(self.buckets)
        """Number of buckets sent in this step; outside a step, the number of all buckets."""
        myself = weakref.ref(self)  # weak, because the garbage collector does not see references from parameter hooks
        for number, bucket in enumerate(self.buckets):
            if any(parameter in late for parameter in bucket.parameters):
                continue
            for parameter in bucket.parameters:
                leaves[parameter].register_post_accumulate_grad_hook(partial(_added, myself, number))

    def begin(self, micro_batches: int) -> None:
        """Call before the backward passes of a step."""
        self._sent = 0
        for bucket in self.buckets:
            bucket.missing = micro_batches * len(bucket.parameters)

    def finish(self) -> None:
        """Call after the last backward pass: waits until all gradients are reduced."""
        for bucket in self.buckets[self._sent :]:  # the first unsent bucket has unused or late parameters
            self._reduce(bucket)
        self._sent = len(self.buckets)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            if bucket.sent is not bucket.buffer:
                bucket.buffer[bucket.summed].copy_(bucket.sent[bucket.summed])
            bucket.sent = bucket.buffer
            bucket.work = None
            bucket.missing = 0

    def zero(self) -> None:
        """Zero all gradients in place."""
        for bucket in self.buckets:
            bucket.buffer.zero_()

    def added(self, number: int) -> None:
        """Called when a backward pass has added to a gradient of bucket ``number``: sends full buckets, in order."""
        self.buckets[number].missing -= 1
        while self._sent < len(self.buckets) and self.buckets[self._sent].missing == 0:
            self._reduce(self.buckets[self._sent])
            self._sent += 1

    def _reduce(self, bucket: Bucket) -> None:
        # the buffer itself, not a copy, if it already has this type
        bucket.sent = bucket.buffer.to(self.dtype)
        if bucket.axis.size > 1:
            bucket.work = dist.all_reduce(bucket.sent, group=bucket.axis.group, async_op=True)


def _added(buckets: "weakref.ref[GradientBuckets]", number: int, parameter: Tensor) -> None:
    """The gradient hook of a parameter in a bucket."""
    owner = buckets()
    if owner is not None:
        owner.added(number)


def megabytes(given: float | None, values: int, compute: Compute) -> float:
    """Size in MB of the buckets for ``values`` gradients: ``given``, or a size chosen for the network.

    A ring over n replicas sends a bucket in n parts. Across nodes, the size must grow with n, or each part's latency exceeds its
    transfer time. CPUs keep one size, because the order of their sums depends on it.
    """
    mesh = compute.mesh
    if given or mesh.nodes == 1 or compute.device.type != "cuda":
        return given or BUCKET_MB
    return max(BUCKET_MB, min(MB_PER_REPLICA * mesh.dp.size, values * 4 / (1 << 20) / MIN_BUCKETS))


def grouped(
    parameters: Iterable[nn.Parameter], size_mb: float, first: int = FIRST_BUCKET_BYTES
) -> Iterator[list[nn.Parameter]]:
    """Group parameters in order into buckets of about ``size_mb`` MB; the first has at most ``first`` bytes."""
    group: list[nn.Parameter] = []
    limit = int(size_mb * (1 << 20))
    size = 0
    room = min(first, limit)
    for parameter in parameters:
        bytes_ = parameter.numel() * parameter.element_size()
        if group and size + bytes_ > room:
            yield group
            group = []
            size = 0
            room = limit
        group.append(parameter)
        size += bytes_
    if group:
        yield group
