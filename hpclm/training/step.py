"""A training step: read its batch and compute it, and record the results of the step before meanwhile.

The device may still compute a step while the host prepares the next one. So a step's results are read only when the next step is queued,
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
from hpclm.training.control import Control, ControlState
from hpclm.training.opening import OpenRun
from hpclm.training.saver import Saver

log = logging.getLogger(__name__)
LATE_STEPS = 3  # steps until the run acts on a signal, if results are read late
POLL_SECONDS = 1.0  # between two polls within a step or an evaluation, about


class StepAbandoned(Exception):
    """The step was not finished: weights and optimizer state are what they were before it."""


@dataclass
class QueuedStep:
    """A step that the device may still be computing."""

    progress: Progress
    """The progress after it, without what only its result tells."""
    result: StepResult
    answer: Reduction
    measured: Mapping[str, Any]
    """Figures for metrics.jsonl that the host knows."""
    micro_batches: int
    waited: float
    """Seconds for its data."""
    began: float
    finished: tuple[float, float] | None
    """By the clocks of time.perf_counter and time.time; None while it is computed."""


class Stepper:
    """Trains one step after the other on this rank."""

    def __init__(self, run: OpenRun, control: Control, saver: Saver, verifier: Verifier | None = None):
        self.run = run
        self.engine = run.engine
        self.control = control
        self.saver = saver
        self.verifier = verifier
        self.schedule = Schedule(run.config.optim, run.data.plan, run.data.length)
        self.guard = NonfiniteGuard(run.config.optim, run.data.begin.skipped, run.data.begin.health)
        self._queued: QueuedStep | None = None
        self._finished = 0.0

    def step(self, progress: Progress) -> Progress:
        """Train on the next batch; returns the progress after it, as far as it is known.

        The device may still compute when this returns; the step before is recorded. StepAbandoned on every rank if a signal leaves no time
        to finish the step; DivergedError if the step before ends the run.
        """
        step = progress.step + 1
        profile, watchdog = self.run.profile, self.run.context.watchdog
        self._device_is_idle()  # notes since when, before this waits for data
        self.run.context.compare_work(step)
        watchdog.enter("step", step)
        if profile:
            profile.before(step)
        began = time.perf_counter()
        lr = self.schedule.rate(progress.step, progress.samples)
        size = self.schedule.batch_size(progress.samples)
        with watchdog.reading():
            batches = self.run.data.train.step(progress.samples)
        waited = time.perf_counter() - began if self._device_is_idle() else 0.0
        result = self.engine.train_step(batches, lr, progress.step, self._check_interrupt(len(batches)))
        self.control.compilations.agree()
        answer = self.control.send(result)
        if self.verifier:
            self.verifier.after_step(batches[0])
        finished = (time.perf_counter(), time.time()) if result.finished else None
        if profile:
            profile.after(step)
        progress = replace(progress, step=step, samples=progress.samples + size)
        memory = hardware.peak_memory(self.run.compute.device)
        measured = dict(lr=lr, loss_scale=result.loss_scale, batch_size=size, memory=memory)
        state = self.finish()
        self._queued = QueuedStep(progress, result, answer, measured, len(batches), waited, began, finished)
        if state is None:
            return progress
        self.check_compilations(state)
        return replace(progress, seconds=state.trained)

    def finish(self) -> ControlState | None:
        """Wait for the queued step, if there is one, and record it; returns the state that all ranks agreed on with it."""
        if self._queued is None:
            return None
        step, self._queued = self._queued, None
        values = step.answer.read()
        step.finished = step.finished or _ago(step.answer.age())
        self._record(step, {name: values[name] for name in step.result.metrics})
        return self.control.receive(values)

    def finish_if_arrived(self) -> None:
        """Record the queued step if its result is here; for a rank that ends because of an error: its peers may never send theirs."""
        if self._queued is not None and self._queued.answer.done():
            self.finish()

    def check_compilations(self, state: ControlState) -> None:
        """HpclmError on every rank if one can no longer compile what others can."""
        if state.compiled_unlike:
            self.saver.wait()  # the pending save is good
            raise self.control.compilations.error()

    def signals_can_wait(self, micro_batches: int) -> bool:
        """Whether a save still fits if the run acts on a signal only after more steps of this many micro-batches each.

        False before a step's time is known, and for long steps.
        """
        late = LATE_STEPS * micro_batches * self.control.micro_batch
        return late > 0 and self.saver.may_begin_after(late)

    def micro_batches_per_poll(self) -> int:
        """Micro-batches that take about POLL_SECONDS; 1 before a step's time is known."""
        return max(1, round(POLL_SECONDS / self.control.micro_batch)) if self.control.micro_batch else 1

    def _check_interrupt(self, micro_batches: int) -> Callable[[int], None]:
        """A function that a step of this many micro-batches calls between two of them, with how many are done.

        It raises StepAbandoned on every rank if the rest of the step, and a save, would exceed the time that a signal leaves.
        """
        if self.signals_can_wait(micro_batches):
            return keep_going
        began, every = time.monotonic(), self.micro_batches_per_poll()

        def check(done: int) -> None:
            if done % every:
                return
            state = self.control.ask()
            left, remaining = self.saver.seconds_left(state), micro_batches - done
            if left is None:
                return
            (needed,) = self.run.context.all_reduce_max((time.monotonic() - began) / done * remaining)
            if needed + self.saver.seconds() < left:
                return
            text = "%s: %.0f s left but the other %d of %d micro-batches may take %.0f s; step abandoned; it will be redone"
            log.warning(text, state.signal, left, remaining, micro_batches, needed)
            self.control.news = state  # so the next turn exits
            raise StepAbandoned

        return check

    def _device_is_idle(self) -> bool:
        """Whether the device is known to have nothing to compute, without waiting for it; notes when the queued step has finished."""
        step = self._queued
        if step is not None and step.finished is None and step.answer.done():
            step.finished = _ago(step.answer.age())
        return step is None or step.finished is not None

    def _record(self, step: QueuedStep, metrics: dict[str, float]) -> None:
        """Check a finished step and record it. Engine metrics other than loss, grad_norm and the counts are logged under their names."""
        loss, grad_norm, skipped = (metrics.pop(name) for name in ("loss", "grad_norm", "skipped"))
        counted_tokens, empty_micro_batches = metrics.pop("counted_tokens", 1), metrics.pop("empty_micro_batches", 0)
        finished, clock = step.finished or _ago(0.0)
        seconds = finished - max(step.began, self._finished)  # it had to wait while the one before it ran
        self._finished = finished
        self.control.trained += seconds
        self.control.micro_batch_seconds = seconds / step.micro_batches
        searching = step.result.loss_scale > self.run.config.scaler.minimum
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
        # numbers that are not finite have chosen the experts of a skipped step
        counts = None if skipped or step.result.expert_tokens is None else step.answer.counts.numpy()
        if self.run.meter:
            self.run.meter.step(step.progress.step, step.progress.samples, row, counts)
        self.guard.check(step.progress.step, loss, grad_norm, bool(skipped), searching)


def _ago(seconds: float) -> tuple[float, float]:
    """The clocks of time.perf_counter and time.time that many seconds ago."""
    return time.perf_counter() - seconds, time.time() - seconds
