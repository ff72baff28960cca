"""Losses on held-out data, which evaluations measure while the run trains."""

import logging
import math
from collections.abc import Callable, Iterator

from hpclm.checkpoint import Progress
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.training.opening import OpenRun

log = logging.getLogger(__name__)


class Evaluator:
    """Measures the parts of the held-out data, each once a step."""

    def __init__(self, run: OpenRun):
        self.run = run
        self.losses = dict(run.losses)
        """Losses by step and part."""
        self._unmeasurable: set[str] = set()
        """Parts in which no token counts in the loss."""

    def evaluate(self, progress: Progress, every: int, is_leaving: Callable[[], bool]) -> None:
        """Measure the parts that have no loss for this step yet, until ``is_leaving()``, which is called ``every`` micro-batches."""
        left = False

        def until_leaving(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
            nonlocal left
            for number, batch in enumerate(batches):
                if number and number % every == 0 and is_leaving():
                    left = True
                    return
                yield batch

        for held in self.run.data.held_out:
            if (progress.step, held.part) in self.losses or held.part in self._unmeasurable:
                continue
            loss = self.run.engine.evaluate(until_leaving(held.batches.take(0, held.size)))
            if left:
                return
            if loss is None:
                text = (
                    "%s skipped: the loss mask excludes every token of the %d samples read; increase evaluate.batches"
                )
                log.warning(text, held.part, held.size)
                self._unmeasurable.add(held.part)
                continue
            self.losses[progress.step, held.part] = loss
            if self.run.meter:
                self.run.meter.evaluated(progress.step, progress.samples, loss, held.part)

    def is_complete(self, step: int) -> bool:
        """Whether every part that can be measured has a loss for ``step``."""
        parts = {held.part for held in self.run.data.held_out} - self._unmeasurable
        return all((step, part) in self.losses for part in parts)

    def measured(self, step: int) -> list[float | None]:
        """The losses of all parts at ``step``; None for those that are not finite."""
        return [loss for (at, _), loss in self.losses.items() if at == step]

    def validation(self, step: int) -> float | None:
        """The mean loss of the parts at ``step``; None unless all that are known are finite."""
        losses = [loss for loss in self.measured(step) if loss is not None]
        return sum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else None
