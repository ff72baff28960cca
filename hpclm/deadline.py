"""A step that is under way when a signal warns: finished where there is time, else left between two micro-batches."""

import logging
import time
from collections.abc import Callable

from hpclm.agreement import Agreement
from hpclm.saver import Saver

log = logging.getLogger(__name__)
OFTEN = 1.0  # seconds between two questions within a step, about: steps that are shorter are never asked


class StepLeft(Exception):
    """The step was not finished: weights and optimizer state are what they were before it."""


class Deadline:
    """Decides, the same on every rank, whether a step can be finished before these processes are killed."""

    def __init__(self, agreement: Agreement, saver: Saver):
        self.agreement, self.saver = agreement, saver
        self._each: float | None = None

    def of_step(self, count: int) -> Callable[[int], None]:
        """What a step of ``count`` micro-batches calls between two of them, with how many are done.

        It raises StepLeft on every rank where what remains, and a save, would take longer than there is.
        """
        began = time.monotonic()
        every = 1 if self._each is None else max(1, round(OFTEN / self._each))

        def between(done: int) -> None:
            if done % every:
                return
            orders = self.agreement()
            left = self.saver.seconds_left(orders)
            if left is None:
                return
            remains = self.agreement.team.highest((time.monotonic() - began) / done * (count - done))
            if remains + self.saver.seconds() < left:
                return
            log.warning(
                "%s leaves %.0f s, and the other %d of %d micro-batches of this step would take %.0f s: it is left, and done again",
                orders.signal,
                left,
                count - done,
                count,
                remains,
            )
            raise StepLeft

        return between

    def took(self, seconds: float, count: int) -> None:
        """A step of ``count`` micro-batches took so long, by the slowest rank."""
        self._each = seconds / count
