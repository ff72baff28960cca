"""Named numbers of all ranks, reduced in one vector on the device while the next step is queued, and read later."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpclm.parallel.collectives import wait
from hpclm.parallel.mesh import Axis


class AsyncAllReduce:
    """All-reduces (max) named numbers without blocking the host or the computing stream."""

    def __init__(self, world: Axis, device: torch.device):
        self.world = world
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._idle: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # an event recorded on a stream without work completes at once, however busy the device is
            self._idle = torch.cuda.Stream(device)

    def start(
        self, values: Mapping[str, float | Tensor], counts: Tensor | None = None, slots: Sequence[float] = ()
    ) -> "Reduction":
        """Send numbers known on the host, and scalars that the device may still be computing. ``counts``: a tensor of any shape.
        ``slots``: more numbers known on the host, without names.

        A collective: every rank sends the same names, with the same kinds of values, in the same order.
        """
        on_host = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        queued = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        names = [*on_host, *queued]
        # float64 holds counts of tokens and samples exactly; fp32 rounds integers above 2^24
        host = torch.tensor([*slots, *on_host.values()], dtype=torch.float64, pin_memory=self._stream is not None)
        # from pageable memory, this copy would block the host
        vector = host.to(self.device, non_blocking=True)
        if queued:
            vector = torch.cat([vector, torch.stack([value.double() for value in queued.values()])])
        if counts is not None:
            vector = torch.cat([vector, counts.flatten().double()])
        work: Any = None
        if self.world.size > 1:
            work = dist.all_reduce(vector, dist.ReduceOp.MAX, group=self.world.group, async_op=True)
        if self._stream is None:
            return Reduction(names, len(slots), vector, work)
        copied = torch.cuda.Event(enable_timing=True)
        back = torch.empty(vector.shape, dtype=torch.float64, pin_memory=True)
        # on a separate stream: if the computing stream waited for the slowest rank, the next step's kernels would be late
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            if work is not None:
                work.wait()  # the stream waits, not the host
            back.copy_(vector, non_blocking=True)
            copied.record()
        return Reduction(names, len(slots), back, work, vector, copied, self._idle)


class Reduction:
    """A pending reduction. It may be dropped unread."""

    def __init__(
        self,
        names: Sequence[str],
        slots: int,
        host: Tensor,
        work: Any,
        device: Tensor | None = None,
        copied: Any = None,
        idle: Any = None,
    ):
        """``device``: kept until ``copied``, the event after which ``host`` is complete. ``idle``: a stream without work."""
        self._names = names
        self._end_of_slots = slots
        self._end_of_values = slots + len(names)
        self._host = host
        self._work = work
        self._device = device
        self._copied = copied
        self._idle = idle

    def done(self) -> bool:
        """True if ``read`` would return at once."""
        if self._copied is not None:
            return bool(self._copied.query())
        return self._work is None or bool(self._work.is_completed())

    def completed(self) -> float:
        """Time (time.perf_counter) at which the vector was complete; call this once ``done`` is true.

        On a GPU, the device's clock measures it: the host may notice late, because it waits while the queue of kernels is full.
        """
        age = 0.0
        if self._copied is not None:
            with suppress(RuntimeError):  # without it, only the log's step time is less exact
                now = torch.cuda.Event(enable_timing=True)
                now.record(self._idle)
                now.synchronize()
                age = max(0.0, float(self._copied.elapsed_time(now)) / 1000)
        return time.perf_counter() - age

    def read(self) -> dict[str, float]:
        """Wait for the reduction; returns each number's maximum over all ranks, by name."""
        if self._copied is not None:
            self._copied.synchronize()
        elif self._work is not None:
            wait(self._work)
        values = self._host[self._end_of_slots : self._end_of_values].tolist()
        return dict(zip(self._names, values, strict=True))

    @property
    def counts(self) -> Tensor:
        """The counts as one fp64 vector, after ``read`` has returned; empty if none were sent."""
        return self._host[self._end_of_values :]

    @property
    def slots(self) -> list[float]:
        """The maxima of the numbers without names, after ``read`` has returned."""
        return self._host[: self._end_of_slots].tolist()
