"""What all ranks agree on once a step: one small vector on the device, reduced while the next step is queued, and read then."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpclm.parallel.collectives import wait
from hpclm.parallel.mesh import Axis


class StepVector:
    """Reduces the numbers of all ranks without a wait of the host, or of the stream that computes."""

    def __init__(self, world: Axis, device: torch.device):
        self.world, self.device = world, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, values: Sequence[float | Tensor]) -> "Reduction":
        """Send numbers that the host knows, and scalars that the device may still be computing.

        Every rank does so at the same places, with the same kinds of values.
        """
        known = [index for index, value in enumerate(values) if not isinstance(value, Tensor)]
        queued = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        host = torch.tensor(
            [values[index] for index in known], dtype=torch.float64, pin_memory=self._stream is not None
        )
        vector = host.to(self.device, non_blocking=True)
        if queued:
            vector = torch.cat([vector, torch.stack([torch.as_tensor(values[index]).double() for index in queued])])
        work: Any = None
        if self.world.size > 1:
            work = dist.all_reduce(vector, dist.ReduceOp.MAX, group=self.world.group, async_op=True)
        if self._stream is None:
            return Reduction(known + queued, vector, work)
        copied, back = torch.cuda.Event(), torch.empty(vector.shape, dtype=torch.float64, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            if work is not None:
                work.wait()  # the stream waits, not the host
            back.copy_(vector, non_blocking=True)
            copied.record()
        return Reduction(known + queued, back, work, copied, vector)


class Reduction:
    """A vector on its way. One that is never read does no harm: it ends by itself."""

    def __init__(self, order: Sequence[int], host: Tensor, work: Any, copied: Any = None, device: Tensor | None = None):
        """``order``: of each element, its place among the values. ``copied``: the event after which ``host`` is complete.
        ``device``: kept until then."""
        self._order, self._host, self._work, self._copied, self._device = order, host, work, copied, device

    def done(self) -> bool:
        """Whether it has arrived, so that ``read`` does not wait."""
        if self._copied is not None:
            return bool(self._copied.query())
        return self._work is None or bool(self._work.is_completed())

    def read(self) -> list[float]:
        """The greatest of all ranks' values, in the order in which they were given; waits until they are known."""
        if self._copied is not None:
            self._copied.synchronize()
        elif self._work is not None:
            wait(self._work)
        return [value for _, value in sorted(zip(self._order, self._host.tolist(), strict=True))]
