"""The results of steps: judged and written down in order, once the device has them."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpclm.checkpoint import Progress
from hpclm.engine import StepResult
from hpclm.optim.stability import NonfiniteGuard
from hpclm.parallel.async_all_reduce import Reduction
from hpclm.training.metrics import Meter
from hpclm.training.sync import ControlState, ControlSync, StepClock


@dataclass
class QueuedStep:
    """A step that the device may still be computing."""

    progress: Progress
    """After it, as far as that is known without its result."""
    result: StepResult
    answer: Reduction
    measured: Mapping[str, Any]
    """What the host knows of it, for metrics.jsonl."""
    micro_batches: int
    waited: float
    """Seconds for its data."""
    began: float
    finished: tuple[float, float] | None
    """By the clocks of time.perf_counter and time.time; None while it is computed."""


class Results:
    """Takes every step as it is queued, and reads it when the next one is, or when it is asked to."""

    def __init__(self, sync: ControlSync, clock: StepClock, guard: NonfiniteGuard, meter: Meter, least_scale: float):
        """``least_scale``: the smallest fp16 loss scale."""
        self.sync, self.clock, self.guard, self.meter = sync, clock, guard, meter
        self.least_scale = least_scale
        self._queued: QueuedStep | None = None
        self._finished = 0.0

    def device_is_idle(self) -> bool:
        """Whether the device has nothing to compute, as far as is known without a wait; if it has just finished, that is
        when."""
        step = self._queued
        if step is not None and step.finished is None and step.answer.done():
            step.finished = _ago(step.answer.age())
        return step is None or step.finished is not None

    def queue(self, step: QueuedStep) -> ControlState | None:
        """Take a step, and read the one before it; what held on all ranks after that one."""
        state = self.read()
        self._queued = step
        return state

    def read(self) -> ControlState | None:
        """Wait for the step that was queued, if there is one. DivergedError where it ends the run."""
        if self._queued is None:
            return None
        step, self._queued = self._queued, None
        values = step.answer.read()
        step.finished = step.finished or _ago(step.answer.age())
        self._record(step, {name: values[name] for name in step.result.metrics})
        return self.sync.state(values)

    def read_arrived(self) -> None:
        """Record the step that was queued if its result is here; for a rank that ends because of an error, whose peers may
        never send theirs."""
        if self._queued is not None and self._queued.answer.done():
            self.read()

    def _record(self, step: QueuedStep, metrics: dict[str, float]) -> None:
        """Judge a step and write it down; ``metrics``: of the engine, all but loss, norm and counts written under their names."""
        loss, grad_norm, skipped = (metrics.pop(name) for name in ("loss", "grad_norm", "skipped"))
        counted_tokens, empty_micro_batches = metrics.pop("counted_tokens", 1), metrics.pop("empty_micro_batches", 0)
        finished, clock = step.finished or _ago(0.0)
        seconds = finished - max(step.began, self._finished)  # while the one before it ran, it had to wait
        self._finished = finished
        self.clock.seconds += seconds
        self.clock.micro_batch = seconds / step.micro_batches
        searching = step.result.loss_scale > self.least_scale
        health = self.guard.health
        if counted_tokens:
            health = self.guard.observe(step.progress.step, loss, bool(skipped), searching)
        waited = min(step.waited, seconds)
        row = dict(
            time=round(clock, 3), loss=loss, grad_norm=grad_norm, skipped=self.guard.skipped + int(skipped), **metrics
        )
        row |= dict(step_seconds=seconds, data_seconds=waited, data_fraction=waited / seconds)
        row |= {**step.measured, **step.result.seconds, **health.row()}
        if not counted_tokens:
            row |= dict(loss=math.nan, counted_tokens=0)
        elif empty_micro_batches:
            row["empty_micro_batches"] = int(empty_micro_batches)
        self.meter.step(step.progress.step, step.progress.samples, row)
        self.guard.check(step.progress.step, loss, grad_norm, bool(skipped), searching)


def _ago(seconds: float) -> tuple[float, float]:
    """The clocks of time.perf_counter and time.time that many seconds ago."""
    return time.perf_counter() - seconds, time.time() - seconds
