"""Gradients that are all-reduced over the replicas as soon as the last micro-batch has added to them.

For pipelines, whose schedules mix the forward and backward passes of many micro-batches: a weight's gradient is complete when as
many backward passes have reached it as there are micro-batches.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpclm.parallel.collectives import buckets
from hpclm.parallel.mesh import Axis

SIZE = 1 << 25  # bytes of a bucket


class CountedReduction:
    """The gradients of one process, in buckets that are all-reduced over ``axis`` beside the rest of the backward passes."""

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis, last: Collection[nn.Parameter] = ()):
        """``last``: parameters whose gradients change after the backward passes; their buckets are reduced by finish()."""
        self.axis = axis
        self.groups = [tuple(group) for group in buckets(parameters, SIZE)] if axis.size > 1 else []
        self.missing: list[int] = []
        """Backward passes that each bucket still waits for."""
        self.pending: dict[int, tuple[Tensor, Any]] = {}
        """The flat copy of each bucket that is being reduced, and the work to wait for."""
        for number, group in enumerate(self.groups):
            if not any(parameter in last for parameter in group):
                for parameter in group:
                    parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._arrived(number))

    def begin(self, micro_batches: int) -> None:
        """Before a step of so many micro-batches; also cleans up after an abandoned one."""
        self._wait()
        self.missing = [len(group) * micro_batches for group in self.groups]

    def finish(self) -> None:
        """After the last backward pass: reduce what is left, and wait for everything."""
        for number in range(len(self.groups)):
            if number not in self.pending:
                self._reduce(number)
        for number, flat in self._wait():
            gradients = self._gradients(number)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        self.missing = []

    def _arrived(self, number: int) -> None:
        if not self.missing:  # a backward pass outside a step
            return
        self.missing[number] -= 1
        if not self.missing[number]:
            self._reduce(number)

    @torch.no_grad()
    def _reduce(self, number: int) -> None:
        gradients = self._gradients(number)
        if gradients:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self.pending[number] = flat, dist.all_reduce(flat, group=self.axis.group, async_op=True)

    def _wait(self) -> list[tuple[int, Tensor]]:
        """The buckets that have been reduced."""
        pending, self.pending = self.pending, {}
        for _, work in pending.values():
            work.wait()
        return [(number, flat) for number, (flat, _) in pending.items()]

    def _gradients(self, number: int) -> list[Tensor]:
        return [parameter.grad for parameter in self.groups[number] if parameter.grad is not None]
