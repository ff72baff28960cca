"""A step that is under way when a signal warns: finished where there is time, else left between two micro-batches."""

import logging
import time
from collections.abc import Callable

from hpclm.engine import keep_going
from hpclm.training.agreement import Agreement
from hpclm.training.saver import Saver

log = logging.getLogger(__name__)
OFTEN = 1.0  # seconds between two questions within a step or an evaluation, about
LATE = 3  # steps that may pass until a signal is acted on where answers are read late


class StepLeft(Exception):
    """The step was not finished: weights and optimizer state are what they were before it."""


class Deadline:
    """Decides, the same on every rank, whether a step can be finished before these processes are killed."""

    def __init__(self, agreement: Agreement, saver: Saver):
        self.agreement, self.saver = agreement, saver
        self._micro_batch = 0.0

    def allows_late(self, count: int) -> bool:
        """Whether there is time to save even where all ranks hear of a signal only after another step of ``count``
        micro-batches. Before a step's time is known, and where steps are long, there is not."""
        late, save = LATE * count * self._micro_batch, self.saver.seconds()
        return late > 0 and not any(save < limit <= save + late for limit in self.saver.limits.values())

    def every(self) -> int:
        """Micro-batches of about OFTEN seconds; 1 before a step's time is known."""
        return max(1, round(OFTEN / self._micro_batch)) if self._micro_batch else 1

    def of_step(self, count: int) -> Callable[[int], None]:
        """What a step of ``count`` micro-batches calls between two of them, with how many are done.

        It raises StepLeft on every rank where what remains, and a save, would take longer than there is.
        """
        if self.allows_late(count):
            return keep_going
        began, every = time.monotonic(), self.every()

        def between(done: int) -> None:
            if done % every:
                return
            orders = self.agreement()
            left = self.saver.seconds_left(orders)
            if left is None:
                return
            (remains,) = self.agreement.context.all_reduce_max((time.monotonic() - began) / done * (count - done))
            if remains + self.saver.seconds() < left:
                return
            text = "%s leaves %.0f s, and the other %d of %d micro-batches of this step would take %.0f s: it is left, and done again"
            log.warning(text, orders.signal, left, count - done, count, remains)
            raise StepLeft

        return between

    def took(self, micro_batch: float) -> None:
        """A micro-batch took so many seconds, by the slowest rank."""
        self._micro_batch = micro_batch
