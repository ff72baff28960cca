"""A run from the inside: what each turn of the training loop does on this rank, and what becomes of each step's results."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from hpclm import files
from hpclm.checkpoint import Progress
from hpclm.diagnostics import corruption
from hpclm.diagnostics.corruption import verifier
from hpclm.engine import StepResult, keep_going
from hpclm.errors import DivergedError
from hpclm.node import hardware
from hpclm.node.notify import Notifier
from hpclm.parallel.async_all_reduce import Reduction
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.sinks.process import Sinks
from hpclm.training import messages, records
from hpclm.training.control import ControlState, RunControl, due
from hpclm.training.metrics import Meter
from hpclm.training.profile import Profile
from hpclm.training.run_context import RunContext
from hpclm.training.run_state import RunState
from hpclm.training.schedule import Schedule

logger = logging.getLogger(__name__)
POLL_SECONDS = 1.0  # between two polls within a step or an evaluation, about


class StepAbandoned(Exception):
    """The step was not finished: weights and optimizer state are what they were before it."""


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

    def __init__(self, control: RunControl, meter: Meter):
        self.sync, self.guard, self.meter = control.sync, control.guard, meter
        self.least_scale = control.config.scaler.minimum
        """The smallest fp16 loss scale."""
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
        self.sync.trained += seconds
        self.sync.micro_batch = seconds / step.micro_batches
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
        # a step whose numbers are not finite has chosen experts by them
        counts = None if skipped or step.result.expert_tokens is None else step.answer.counts.numpy()
        self.meter.step(step.progress.step, step.progress.samples, row, counts)
        self.guard.check(step.progress.step, loss, grad_norm, bool(skipped), searching)


def _ago(seconds: float) -> tuple[float, float]:
    """The clocks of time.perf_counter and time.time that many seconds ago."""
    return time.perf_counter() - seconds, time.time() - seconds


@dataclass(frozen=True)
class Outputs:
    """Where an attempt says how it goes."""

    meter: Meter
    sinks: Sinks
    profile: Profile
    notifier: Notifier


class Session:
    """An attempt of a run, on one rank."""

    def __init__(self, run: RunContext, state: RunState, control: RunControl, outputs: Outputs):
        self.run, self.config, self.context, self.device = run, run.config, run.distributed, run.compute.device
        self.data, self.control, self.outputs, self.meter = state.data, control, outputs, outputs.meter
        self.engine, self.attempt = state.engine, state.attempt
        self.progress = state.data.begin
        """Where it begins."""
        self.schedule = Schedule(self.config.optim, self.data.plan, self.data.length)
        self.results = Results(control, self.meter)
        self.verifier = verifier(self.engine, run.compute.mesh, self.context, self.config.cluster.verify_every)
        self.unmeasurable: set[str] = set()
        """Parts of the held-out data in which no token counts in the loss."""

    def must_synchronize(self, progress: Progress) -> bool:
        """Whether something may have to be done between the last step and the next."""
        late = self.control.must_synchronize(progress, self.data.plan.accumulation(progress.samples))
        return late or self._verification_is_due(progress)

    def synchronize(self, progress: Progress) -> Progress:
        """Wait for the last step, and agree with all ranks; how far the run is. DivergedError where it has."""
        with self._saved_before_it_ends():
            self.results.read()
        self.control.poll()
        self._check_compilations(self.control.state)
        seconds = self.control.state.trained
        return replace(progress, seconds=seconds, skipped=self.control.guard.skipped, health=self.control.guard.health)

    def evaluation_is_due(self, progress: Progress) -> bool:
        """Whether the model is to be measured after this step."""
        return self.control.finished(progress) or due(self.config.evaluate.every, progress)

    def validation(self, progress: Progress) -> float | None:
        """The loss on held-out data after the last step, where it was measured; of several parts the mean."""
        return self.meter.validation(progress.step)

    def _unmeasured(self, step: int) -> bool:
        """Whether the final evaluation is incomplete."""
        parts = {held.part for held in self.data.held_out} - self.unmeasurable
        return any((step, part) not in self.meter.losses for part in parts)

    def evaluate(self, progress: Progress) -> None:
        """Measure the parts of the held-out data that have no figure for this step yet, until a signal warns."""
        self.context.watchdog.enter("evaluation", progress.step)
        every, warned = self._micro_batches_per_poll(), False

        def until_warned(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
            nonlocal warned
            for number, batch in enumerate(batches):
                if number and number % every == 0 and self.control.sync.poll().leaving:
                    warned = True
                    return
                yield batch

        for held in self.data.held_out:
            if (progress.step, held.part) not in self.meter.losses and held.part not in self.unmeasurable:
                loss = self.engine.evaluate(until_warned(held.batches.take(0, held.size)))
                if warned:
                    return
                if loss is None:
                    logger.warning(
                        "%s is not measured: by the loss mask no token of the %d samples that are read counts; a larger evaluate.batches reads more",
                        held.part,
                        held.size,
                    )
                    self.unmeasurable.add(held.part)
                    continue
                self.meter.evaluated(progress.step, progress.samples, loss, held.part)

    def _verification_is_due(self, progress: Progress) -> bool:
        return self.verifier is not None and due(self.config.cluster.verify_every, progress)

    def verify(self, progress: Progress) -> None:
        """Look for silent corruption when that is due, and before the state is saved; CorruptedError where there is some, and
        DivergedError where the user's own code may have caused it."""
        if self.verifier is None or not (self._verification_is_due(progress) or self.control.saves_now(progress)):
            return
        self.context.watchdog.enter("verification", progress.step)
        problems = self.verifier.check(recompute=not self.control.state.signal)  # after a signal, time is short
        if problems:
            self.control.saver.wait()  # what is being written was good
            out = self.run.out
            step, saved, own_code = progress.step, self.control.saver.step, self.config.code_of_training()
            if own_code:
                corruption.blame_program(problems, step, saved, own_code, self.context)
            corruption.end_run(problems, step, saved, self.context, self.device, out)

    def train_step(self, progress: Progress) -> Progress:
        """Learn from the next batch; how far the run is then, as far as that is known.

        The device may still compute when this returns; the step before is finished. StepAbandoned on every rank, when a signal
        leaves no time to finish it; DivergedError where the run has.
        """
        step = progress.step + 1
        self.results.device_is_idle()  # notes that, before this waits for data
        self.context.watchdog.enter("step", step)
        self.outputs.profile.before(step)
        began = time.perf_counter()
        lr = self.schedule.rate(progress)
        size = self.schedule.batch_size(progress)
        with self._saved_before_it_ends():
            with self.context.watchdog.reading():
                batches = self.data.train.step(progress.samples)
            waited = time.perf_counter() - began if self.results.device_is_idle() else 0.0
            result = self.engine.train_step(batches, lr, progress.step, self._check_interrupt(len(batches)))
            self.control.sync.compilations.agree()
            reduction = self.control.sync.start(result)
            if self.verifier:
                self.verifier.after_step(batches[0])
            finished = (time.perf_counter(), time.time()) if result.finished else None
            self.outputs.profile.after(step)
            progress = replace(progress, step=step, samples=progress.samples + size)
            measured = dict(
                lr=lr, loss_scale=result.loss_scale, batch_size=size, memory=hardware.peak_memory(self.device)
            )
            queued = QueuedStep(progress, result, reduction, measured, len(batches), waited, began, finished)
            answer = self.results.queue(queued)
        if answer is None:
            return progress
        self.control.apply(answer)
        self._check_compilations(answer)
        return replace(progress, seconds=answer.trained)

    def _micro_batches_per_poll(self) -> int:
        """Micro-batches of about POLL_SECONDS; 1 before a step's time is known."""
        return max(1, round(POLL_SECONDS / self.control.micro_batch)) if self.control.micro_batch else 1

    def _check_interrupt(self, micro_batches: int) -> Callable[[int], None]:
        """What a step of so many micro-batches calls between two of them, with how many are done.

        It raises StepAbandoned on every rank where the rest of the step, and a save, would take longer than there is.
        """
        if self.control.can_check_signals_late(micro_batches):
            return keep_going
        began, every = time.monotonic(), self._micro_batches_per_poll()

        def check(done: int) -> None:
            if done % every:
                return
            state = self.control.sync.poll()
            left, remaining = self.control.saver.seconds_left(state), micro_batches - done
            if left is None:
                return
            (needed,) = self.context.all_reduce_max((time.monotonic() - began) / done * remaining)
            if needed + self.control.saver.seconds() < left:
                return
            text = "%s: %.0f s left but the other %d of %d micro-batches may take %.0f s; step abandoned; it will be redone"
            logger.warning(text, state.signal, left, remaining, micro_batches, needed)
            raise StepAbandoned

        return check

    def _check_compilations(self, state: ControlState) -> None:
        """HpclmError on every rank where one can no longer compile what others can."""
        if state.compiled_unlike:
            self.control.saver.wait()  # what is being written was good
            raise self.control.sync.compilations.error()

    def exit(self, progress: Progress) -> int:
        """Save, and record how the attempt ends; the exit code."""
        self.meter.flush()
        if self.control.finished(progress):
            with self._saved_before_it_ends():
                held_out = [loss for (step, _), loss in self.meter.losses.items() if step == progress.step]
                self.control.guard.check_end(progress.step, held_out)
        self.context.watchdog.enter("save", progress.step)
        unmeasured = self.control.finished(progress) and self._unmeasured(progress.step)
        code = self.control.exit(progress, self.validation(progress), unmeasured)
        state, ending = self._log_end(progress, code, unmeasured)
        if self.attempt is not None:
            records.end(self.run.out, self.attempt, code, self.control.saver.step, ending)
        self.meter.end(state, ending, code)
        self.outputs.sinks.code = code
        if self.context.is_main and self.control.finished(progress) and not code:
            self.outputs.notifier.send("finished", messages.ending(self.config, self.data.length, progress, ""))
        if code and self.context.is_main and (why := self.context.job.requeue_if_abandoned()):
            logger.warning("%s: %s was asked to start the job again", why, self.context.job.scheduler)
        return code

    def _log_end(self, progress: Progress, code: int, unmeasured: bool) -> tuple[str, str]:
        """Log how the run ends, and what follows; its state and ending for summary.json.

        ``unmeasured``: it has finished, but its last step has yet to be measured.
        """
        control, health = self.control, progress.health
        leaving = control.state.leaving
        if unmeasured:
            logger.warning("%s left no time to measure the model after step %d, the last one", leaving, progress.step)
        if not health.good:
            text = "%s; hpclm checkpoints %s shows which are healthy"
            logger.warning(text, health.describe(), files.typed(self.config.out))
        if code:
            step = control.saver.step
            saved = f"saved at step {step}, exiting; the same command resumes from here"
            nothing = "nothing saved, exiting; the same command starts again"
            state, text = "exited", f"{control.state.signal}: {saved if step else nothing}"
            logger.warning("%s", text)
        else:
            over = control.finished(progress) and not unmeasured
            text = messages.ending(self.config, self.data.length, progress, "" if over else leaving or "exit_interval")
            state = text.partition(" ")[0]
            logger.info("%s", text)
        return state, text.partition(";")[0]

    @contextmanager
    def _saved_before_it_ends(self) -> Iterator[None]:
        """Where the run ends here because it has diverged, on every rank: what is being written was good. StepAbandoned ends none,
        and any other error may be this rank's alone, which then waits for nothing."""
        try:
            yield
        except DivergedError as error:
            try:
                self.results.read()  # the step before it, if it is not known yet
            finally:
                self.control.saver.wait()
            raise DivergedError(f"{error}. {messages.way_back(self.config)}") from None
        except StepAbandoned:
            raise
        except Exception:
            with suppress(Exception):  # whatever fails here must not hide the error itself
                self.results.read_arrived()
            raise
