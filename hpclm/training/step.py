"""A training step: read its batch, queue its computation, and record the step before it.

The device may still compute a step while the host prepares the next one. So a step's result is read only once the next step is queued,
or when the run has something else to do.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpclm.checkpoint import Progress
from hpclm.diagnostics.corruption import Verifier
from hpclm.engine import StepResult, keep_going
from hpclm.node import hardware
from hpclm.optim.schedules import Schedule
from hpclm.optim.stability import NonfiniteGuard
from hpclm.parallel.async_all_reduce import Reduction
from hpclm.training import messages
from hpclm.training.control import Control, ControlState, sum_of_hashes
from hpclm.training.opening import OpenRun
from hpclm.training.saver import Saver

log = logging.getLogger(__name__)
LATE_STEPS = 3  # steps until the run acts on a signal, if results are read late
POLL_SECONDS = 1.0  # between two polls within a step or an evaluation, roughly


class StepAbandoned(Exception):
    """The step was not finished; weights and optimizer state are unchanged."""


@dataclass
class QueuedStep:
    """A step that the device may still be computing."""

    progress: Progress  # after the step, without the values that only its result has
    result: StepResult
    reduction: Reduction  # the metrics and control values of all ranks
    measured: Mapping[str, Any]  # fields of metrics.jsonl that the host knows already
    micro_batches: int
    waited: float  # seconds that the device waited for the step's data
    began: float  # when the host began the step, by time.perf_counter
    finished: float | None  # when the device finished the step, by the same clock; None while it computes


class Stepper:
    """Trains one step after the other on this rank."""

    def __init__(self, run: OpenRun, control: Control, saver: Saver, verifier: Verifier | None = None):
        self.run = run
        self.engine = run.engine
        self.control = control
        self.saver = saver
        self.verifier = verifier
        self.schedule = Schedule(run.config.optim, run.data.plan, run.data.length, run.data.timeline)
        self.guard = NonfiniteGuard(run.config.optim, run.data.begin.skipped, run.data.begin.health)
        self._queued: QueuedStep | None = None
        self._last_finished = 0.0  # when the device finished the last recorded step, by time.perf_counter

    def step(self, progress: Progress) -> Progress:
        """Queue a step on the next batch, and record the step before it; returns the progress after the new step.

        The device may still compute when this returns. StepAbandoned on every rank if a signal leaves no time to finish the step;
        DivergedError if the step before it ends the run.
        """
        step = progress.step + 1
        profile = self.run.profile
        watchdog = self.run.context.watchdog
        self._note_finish()  # before the host waits for data
        self.run.context.compare_work(step)
        watchdog.enter("step", step)
        if profile:
            profile.before(step)
        messages.phase_begins(self.run.data.timeline, step, progress.samples)
        began = time.perf_counter()
        lr = self.schedule.rate(progress.step, progress.samples)
        size = self.schedule.batch_size(progress.samples)
        with watchdog.reading():
            batches = self.run.data.train.step(progress.samples)
        waited = time.perf_counter() - began if self._note_finish() else 0.0
        result = self.engine.train_step(batches, lr, progress.step, self._check_interrupt(len(batches)))
        reduction = self.control.send(result)
        if self.verifier:
            self.verifier.after_step(batches[0])
        finished = time.perf_counter() if result.finished else None
        if profile:
            profile.after(step)
        samples = progress.samples + size
        progress = replace(progress, step=step, samples=samples, phases=self.run.data.begun(samples))
        memory = hardware.peak_memory(self.run.compute.device)
        measured = dict(lr=lr, loss_scale=result.loss_scale, batch_size=size, memory=memory)
        state = self.finish()
        self._queued = QueuedStep(progress, result, reduction, measured, len(batches), waited, began, finished)
        if state is None:
            return progress
        return replace(progress, seconds=state.trained_seconds)

    def _note_finish(self) -> bool:
        """Note when the device finished the queued step, if it has; returns whether the device is idle. Never waits for the device."""
        step = self._queued
        if step is None:
            return True
        if step.finished is None and step.reduction.done():
            step.finished = step.reduction.completed()
        return step.finished is not None

    def _check_interrupt(self, micro_batches: int) -> Callable[[int], None]:
        """The function that a step of this many micro-batches calls between two of them, with the number that are done.

        It raises StepAbandoned on every rank if the rest of the step and a save would exceed the time that a signal leaves.
        """
        if self.signals_can_wait(micro_batches):
            return keep_going
        began = time.monotonic()
        every = self.micro_batches_per_poll()

        def check(done: int) -> None:
            if done % every:
                return
            state = self.control.ask()
            left = self.saver.seconds_left(state)
            if left is None:
                return
            remaining = micro_batches - done
            (needed,) = self.run.context.all_reduce_max((time.monotonic() - began) / done * remaining)
            if needed + self.saver.seconds() < left:
                return
            text = "%s: %.0f s left but the other %d of %d micro-batches may take %.0f s; step abandoned; it will be redone"
            log.warning(text, state.signal, left, remaining, micro_batches, needed)
            self.control.news = state  # so that the next turn exits
            raise StepAbandoned

        return check

    def signals_can_wait(self, micro_batches: int) -> bool:
        """Whether a save still fits if the run acts on a signal only LATE_STEPS steps of this many micro-batches later.

        False before a step's time is known, and for long steps.
        """
        late = LATE_STEPS * micro_batches * self.control.micro_batch_seconds
        return late > 0 and self.saver.may_begin_after(late)

    def micro_batches_per_poll(self) -> int:
        """Micro-batches that take about POLL_SECONDS; 1 before a step's time is known."""
        seconds = self.control.micro_batch_seconds
        if not seconds:
            return 1
        return max(1, round(POLL_SECONDS / seconds))

    def finish(self) -> ControlState | None:
        """Wait for the queued step, if any, and record it; returns the state that all ranks agreed on with it."""
        step = self._queued
        if step is None:
            return None
        self._queued = None
        values = step.reduction.read()
        finished = step.finished or step.reduction.completed()
        self._record(step, finished, {name: values[name] for name in step.result.metrics})
        return self.control.receive(values)

    def finish_if_arrived(self) -> None:
        """Record the queued step if its result has arrived. For ranks that end with an error: peers may never send their results."""
        if self._queued is not None and self._queued.reduction.done():
            self.finish()

    def _record(self, step: QueuedStep, finished: float, metrics: dict[str, float]) -> None:
        """Check a finished step and record it. Engine metrics other than loss, grad_norm and the counts keep their names."""
        number = step.progress.step
        loss = metrics.pop("loss")
        grad_norm = metrics.pop("grad_norm")
        skipped = bool(metrics.pop("skipped"))
        counted_tokens = metrics.pop("counted_tokens", 1)
        empty_micro_batches = metrics.pop("empty_micro_batches", 0)
        seconds = finished - max(step.began, self._last_finished)  # the device began this step after the one before
        self._last_finished = finished
        self.control.own_trained_seconds += seconds
        self.control.own_micro_batch_seconds = seconds / step.micro_batches
        searching = step.result.loss_scale > self.run.config.scaler.minimum
        health = self.guard.health
        if counted_tokens:
            health = self.guard.observe(number, loss, skipped, searching)
        row = dict(
            time=round(time.time() - (time.perf_counter() - finished), 3),
            loss=loss,
            data_hash=sum_of_hashes(step.reduction.slots),
            grad_norm=grad_norm,
            skipped=self.guard.skipped + int(skipped),  # ``check`` below counts this step
            **metrics,
        )
        waited = min(step.waited, seconds)
        row |= dict(step_seconds=seconds, data_seconds=waited, data_fraction=waited / seconds)
        row |= {**step.measured, **step.result.seconds, **health.row()}
        if not counted_tokens:
            row |= dict(loss=math.nan, counted_tokens=0)
        elif empty_micro_batches:
            row["empty_micro_batches"] = int(empty_micro_batches)
        expert_tokens = None
        if not skipped and step.result.expert_tokens is not None:  # a skipped step may have routed by non-finite scores
            expert_tokens = step.reduction.counts.numpy()
        if self.run.meter:
            if self.run.callbacks:
                row["callback_seconds"] = self.run.callbacks.take_seconds()
            written = self.run.meter.step(number, step.progress.samples, row, expert_tokens)
            if self.run.callbacks:
                self.run.callbacks.after_step(number, written)
        self.guard.check(number, loss, grad_norm, skipped, searching)
