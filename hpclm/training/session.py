"""A run from the inside: what each turn of the training loop does on this rank."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from hpclm.checkpoint import Progress
from hpclm.config import RunConfig
from hpclm.distributed import restart
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine
from hpclm.errors import DivergedError
from hpclm.node import hardware
from hpclm.node.notify import Notifier
from hpclm.optim.stability import NonfiniteGuard
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.sinks.process import Sinks
from hpclm.training import corruption, messages, records
from hpclm.training.compiling import AgreedCompilations
from hpclm.training.control import RunControl, StepAbandoned, due
from hpclm.training.corruption import Verifier
from hpclm.training.metrics import Meter
from hpclm.training.profile import Profile
from hpclm.training.results import QueuedStep, Results
from hpclm.training.run_data import RunData
from hpclm.training.schedule import Schedule
from hpclm.training.sync import ControlState

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """An attempt of a run, on one rank."""

    config: RunConfig
    context: DistributedContext
    device: torch.device
    data: RunData
    schedule: Schedule
    engine: Engine
    compilations: AgreedCompilations
    guard: NonfiniteGuard
    control: RunControl
    verifier: Verifier | None
    results: Results
    meter: Meter
    progress: Progress
    """Where it begins."""
    profile: Profile
    attempt: int | None
    """Its number, on rank 0."""
    sinks: Sinks
    notifier: Notifier
    unmeasurable: set[str] = field(default_factory=set)
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
        return replace(progress, seconds=seconds, skipped=self.guard.skipped, health=self.guard.health)

    def evaluation_is_due(self, progress: Progress) -> bool:
        """Whether the model is to be measured after this step."""
        return self.control.finished(progress) or due(self.config.evaluate.every, progress)

    def validation(self, progress: Progress) -> float | None:
        """The loss on held-out data after the last step, where it was measured; of several parts the mean."""
        return self.meter.validation(progress.step)

    def _unmeasured(self, step: int) -> bool:
        """Whether the final evaluation is incomplete."""
        parts = {each.part for each in self.data.held_out} - self.unmeasurable
        return any((step, part) not in self.meter.losses for part in parts)

    def evaluate(self, progress: Progress) -> None:
        """Measure the parts of the held-out data that have no figure for this step yet, until a signal warns."""
        self.context.watchdog.enter("evaluation", progress.step)
        every, warned = self.control.micro_batches_per_poll(), False

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
            out = Path(self.config.out)
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
        self.profile.before(step)
        began = time.perf_counter()
        lr = self.schedule.rate(progress)
        size = self.schedule.batch_size(progress)
        with self._saved_before_it_ends():
            with self.context.watchdog.reading():
                batches = self.data.train.step(progress.samples)
            waited = time.perf_counter() - began if self.results.device_is_idle() else 0.0
            result = self.engine.train_step(batches, lr, progress.step, self.control.check_interrupt(len(batches)))
            self.compilations.agree()
            reduction = self.control.sync.start(result.metrics)
            if self.verifier:
                self.verifier.after_step(batches[0])
            finished = (time.perf_counter(), time.time()) if result.finished else None
            self.profile.after(step)
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

    def _check_compilations(self, state: ControlState) -> None:
        """HpclmError on every rank where one can no longer compile what others can."""
        if state.compiled_unlike:
            self.control.saver.wait()  # what is being written was good
            raise self.compilations.error()

    def exit(self, progress: Progress) -> int:
        """Save, and record how the attempt ends; the exit code."""
        self.meter.flush()
        if self.control.finished(progress):
            with self._saved_before_it_ends():
                held_out = [loss for (step, _), loss in self.meter.losses.items() if step == progress.step]
                self.guard.check_end(progress.step, held_out)
        self.context.watchdog.enter("save", progress.step)
        unmeasured = self.control.finished(progress) and self._unmeasured(progress.step)
        code = self.control.exit(progress, self.validation(progress), unmeasured)
        state, ending = messages.log_end(self.config, self.data.length, progress, self.control, code, unmeasured)
        if self.attempt is not None:
            records.end(Path(self.config.out), self.attempt, code, self.control.saver.step, ending)
        self.meter.end(state, ending, code)
        self.sinks.code = code
        if self.context.is_main and self.control.finished(progress) and not code:
            self.notifier.send("finished", messages.ending(self.config, self.data.length, progress, ""))
        if code and self.context.is_main and restart.abandoned():
            logger.warning("the job's script was killed (JobLaunchFailure): Slurm was asked to start the job again")
        return code

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
