"""Evaluation while the run trains: losses on held-out data."""

import logging
import math
from collections.abc import Callable, Iterator

from hpclm.checkpoint import Progress
from hpclm.data import sources
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.training.opening import OpenRun

log = logging.getLogger(__name__)


class Evaluator:
    """Measures the parts of the held-out data, each once a step."""

    def __init__(self, run: OpenRun):
        self.run = run
        begin = run.data.begin.step
        self.losses = {(begin, part): loss for part, loss in run.losses.items()}
        """Losses by step and part; None if not finite."""
        self._unmeasurable: set[str] = set()
        """Parts without any token that counts in the loss."""
        self._bits: dict[str, float | None] = {}
        """See sources.bits_per_byte, of each part; on rank 0."""
        if run.meter:
            self._bits = {held.part: sources.bits_per_byte(run.data.source, held.part) for held in run.data.held_out}

    def evaluate(self, progress: Progress, every: int, is_leaving: Callable[[], bool]) -> None:
        """Measure the parts that have no loss for this step yet. Stop once ``is_leaving()``, which is called every ``every`` micro-batches."""
        interrupted = False
        known = len(self.losses)

        def until_leaving(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
            nonlocal interrupted
            for number, batch in enumerate(batches):
                interrupted = number > 0 and number % every == 0 and is_leaving()
                if interrupted:
                    return
                yield batch

        for held_out in self.run.data.held_out:
            part = held_out.part
            if (progress.step, part) in self.losses or part in self._unmeasurable:
                continue
            loss = self.run.engine.evaluate(until_leaving(held_out.batches.take(0, held_out.size)))
            if interrupted:
                return
            of_average = None
            if loss is not None and self.run.config.optim.ema is not None:
                with self.run.engine.averaged():
                    of_average = self.run.engine.evaluate(until_leaving(held_out.batches.take(0, held_out.size)))
                if interrupted:
                    return
            if loss is None:
                text = (
                    "%s skipped: the loss mask excludes every token of the %d samples read; increase evaluate.batches"
                )
                log.warning(text, part, held_out.size)
                self._unmeasurable.add(part)
                continue
            self.losses[progress.step, part] = loss
            if self.run.meter:
                self.run.meter.evaluated(progress.step, progress.samples, loss, part, self._bits[part], of_average)
        if self.run.callbacks and len(self.losses) > known:
            losses = {part: loss for (step, part), loss in self.losses.items() if step == progress.step}
            self.run.callbacks.after_evaluation(progress.step, losses)

    def is_complete(self, step: int) -> bool:
        """Whether every part that can be measured has a loss for ``step``."""
        parts = {held.part for held in self.run.data.held_out} - self._unmeasurable
        return all((step, part) in self.losses for part in parts)

    def measured(self, step: int) -> list[float | None]:
        """The losses of all parts at ``step``; None for a loss that is not finite."""
        return [loss for (at, _), loss in self.losses.items() if at == step]

    def validation(self, step: int) -> float | None:
        """The mean of the parts' losses at ``step``; None if none is known, or one is infinite or NaN."""
        losses = [loss for loss in self.measured(step) if loss is not None]
        if not losses or not all(map(math.isfinite, losses)):
            return None
        return sum(losses) / len(losses)
