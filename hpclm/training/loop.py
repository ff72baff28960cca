"""The training loop: train a step and record it; evaluate, verify, save and exit when due.

It knows no engine, launcher or data format. All ranks take the same turns, because they decide by values that they have agreed on.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from hpclm.base import files
from hpclm.base.errors import DivergedError, ExitCode
from hpclm.checkpoint import Progress
from hpclm.diagnostics import corruption
from hpclm.distributed.context import DistributedContext
from hpclm.rundir import folder
from hpclm.training import messages
from hpclm.training.callbacks import FAILED
from hpclm.training.control import Control, ControlState
from hpclm.training.evaluation import Evaluator
from hpclm.training.opening import MemoryPlanner, OpenRun, open_run
from hpclm.training.saver import Saver, SignalWatch, due
from hpclm.training.start import RunStart
from hpclm.training.step import StepAbandoned, Stepper

log = logging.getLogger(__name__)


def run(start: RunStart, context: DistributedContext, planner: MemoryPlanner | None = None) -> int:
    """Train until the budget is used up, the settings or a request end the run, or a signal warns; returns the exit code.

    Every rank of ``context`` calls this, and all take every turn together. ``planner``: chooses batch.micro_size=auto and explains
    out-of-memory errors.
    """
    with open_run(start, context, planner) as opened:
        return TrainingLoop(opened).train()


class TrainingLoop:
    """The loop of a run that is open on this rank."""

    def __init__(self, run: OpenRun):
        config = run.config
        per_save = run.data.samples_per_save(config.checkpoint.epochs)
        self.run = run
        self.config = config
        self.context = run.context
        self.engine = run.engine
        self.control = Control(run)
        self.saver = Saver(run.store, config.checkpoint, config.job.warn_seconds, run.data.begin, per_save, self._flush)
        self.verifier = corruption.verifier(run.engine, run.compute.mesh, run.context, config.cluster.verify_every)
        self.stepper = Stepper(run, self.control, self.saver, self.verifier)
        self.evaluator = Evaluator(run)
        run.context.watchdog.each_turn = SignalWatch(config, run.context.watchdog, run.preemption, self.saver)

    def train(self) -> int:
        """Train until the run exits; returns the exit code."""
        progress = self.run.data.begin
        with self._divergence_handled():
            while True:
                if self.work_is_due(progress):  # otherwise the next step is queued before this one's result is known
                    progress = self.finish_step(progress)
                    if self.evaluation_is_due(progress):
                        self.evaluate(progress)
                    exits = self.exit_is_due(progress)
                    saves = self.save_is_due(progress, exits)
                    if self.verifier and (saves or self.verification_is_due(progress)):
                        self.verify(progress)
                    if exits:
                        return self.exit(progress)
                    if saves:
                        self.save(progress)
                    self.answer_save_request()
                try:
                    progress = self.stepper.step(progress)
                except StepAbandoned:
                    continue  # a signal leaves too little time for the step, so the next turn exits

    @contextmanager
    def _divergence_handled(self) -> Iterator[None]:
        """If the run diverges in the block, publish the pending save, whose state was good, before the error is raised.

        All ranks see a divergence together. Any other error may be this rank's alone, so nothing waits for the others.
        """
        try:
            yield
        except DivergedError as error:
            if error.shared:  # by ``verify``, which has published the save and says what to do
                raise
            try:
                self.stepper.finish()  # records the previous step, unless it is recorded already
            finally:
                self.saver.wait()
            raise DivergedError(f"{error}. {messages.way_back(self.config)}") from None
        except Exception:
            with suppress(Exception):  # an error in here must not hide the first one
                self.stepper.finish_if_arrived()
            raise

    def work_is_due(self, progress: Progress) -> bool:
        """Whether the run may have more to do after this step than to train the next one."""
        news = self.control.news or ControlState(written=False)  # without news since the last poll, nothing is due
        if news.leaving or news.save or news.lost or (news.written and self.run.store.pending):
            return True
        if self.attempt_ends(progress) or self.evaluation_is_due(progress) or self.saver.due(progress, news):
            return True
        if self.verifier and self.verification_is_due(progress):
            return True
        # if a signal leaves little time, or steps are long, the run must not train another step before it saves
        micro_batches = self.run.data.plan.accumulation(progress.samples)
        return not self.stepper.signals_can_wait(micro_batches)

    def finish_step(self, progress: Progress) -> Progress:
        """Wait for the last step, record it, and agree with all ranks on what to do; returns the progress with its results."""
        self.stepper.finish()
        state = self.poll()
        guard = self.stepper.guard
        return replace(progress, seconds=state.trained_seconds, skipped=guard.skipped, health=guard.health)

    def poll(self) -> ControlState:
        """Agree on signals and requests with all ranks, and publish a checkpoint that all have written."""
        state = self.control.poll()
        if state.written:
            self.saver.wait()
        return state

    def evaluation_is_due(self, progress: Progress) -> bool:
        """Whether the model is evaluated after this step."""
        return self.finished(progress) or due(self.config.evaluate.every, progress)

    def evaluate(self, progress: Progress) -> None:
        """Measure the loss on held-out data, until a signal or request ends the run."""
        self.context.watchdog.enter("evaluation", progress.step)
        every = self.stepper.micro_batches_per_poll()
        self.evaluator.evaluate(progress, every, lambda: bool(self.control.ask().leaving))
        self.poll()

    def exit_is_due(self, progress: Progress) -> bool:
        """Whether the run exits after this step."""
        return self.attempt_ends(progress) or bool(self.control.state.leaving)

    def attempt_ends(self, progress: Progress) -> bool:
        """Whether the settings end the attempt after this step."""
        return self.finished(progress) or self.interval_ends(progress) or self.phase_ends(progress)

    def interval_ends(self, progress: Progress) -> bool:
        """Whether exit_interval ends the attempt after this step."""
        return due(self.config.exit_interval or 0, progress) and progress.step > self.run.data.begin.step

    def phase_ends(self, progress: Progress) -> bool:
        """Whether the ranks have to start again for the next step, because it is in a phase with another network or batch."""
        ends = progress.samples == self.run.data.ends_before
        return ends and not (self.finished(progress) or self.interval_ends(progress))

    def finished(self, progress: Progress) -> bool:
        """Whether the run has used up its budget, or reached stop_at."""
        ends = [end for end in (self.run.data.length.steps, self.config.stop_at) if end is not None]
        hours = self.config.budget.hours
        out_of_time = hours is not None and progress.seconds >= hours * 3600
        return out_of_time or any(progress.step >= end for end in ends)

    def save_is_due(self, progress: Progress, exits: bool) -> bool:
        """Whether the state after this step is saved now, if there is time.

        While steps are skipped, a save is postponed: a run that may have diverged must not replace good checkpoints.
        """
        if exits:
            return self.config.checkpoint.enabled and progress.step > self.saver.step
        if not self.saver.due(progress, self.control.state):
            return False
        if progress.health.skipped_in_a_row:
            self.saver.postponed = True
            return False
        return True

    def verification_is_due(self, progress: Progress) -> bool:
        """Whether to look for silent corruption after this step."""
        return due(self.config.cluster.verify_every, progress)

    def verify(self, progress: Progress) -> None:
        """Look for silent corruption; CorruptedError if any, or DivergedError if the user's own code may have caused it."""
        assert self.verifier is not None
        self.context.watchdog.enter("verification", progress.step)
        problems = self.verifier.check(recompute=not self.control.state.signal)  # after a signal, time is short
        if not problems:
            return
        self.saver.wait()  # the pending save is good
        own_code = self.config.code_of_training()
        if own_code:
            corruption.blame_program(problems, progress.step, self.saver.step, own_code, self.context)
        device = self.run.compute.device
        corruption.end_run(problems, progress.step, self.saver.step, self.context, device, self.run.out)

    def save(self, progress: Progress) -> None:
        """Save; with checkpoint.background, begin to save."""
        self.saver.save(self.engine, progress, self.evaluator.validation(progress.step), self.control.state)

    def answer_save_request(self) -> None:
        """Remove a save-now request that has been carried out, or cannot be."""
        if self.control.state.save and not self.saver.postponed:
            if not self.config.checkpoint.enabled:
                log.warning("request to save: checkpoint.enabled=false, so nothing is saved")
            self.control.remove("save-now")

    def exit(self, progress: Progress) -> int:
        """Save, and record how the attempt ends; returns the exit code."""
        state = self.control.state
        finished = self.finished(progress)
        if self.run.meter:
            self.run.meter.flush()
        if finished:
            self.stepper.guard.check_end(progress.step, self.evaluator.measured(progress.step))
        self.context.watchdog.enter("save", progress.step)
        measured = self.evaluator.is_complete(progress.step)
        over = finished and measured  # no other attempt is needed
        requeue = bool(state.signal and not over and not state.stop)
        self.saver.exit(self.engine, progress, self.evaluator.validation(progress.step), state, requeue)
        if self.phase_ends(progress):  # a signal may have come during the save, and the next start would not know of it
            state = self.poll()
            requeue = bool(state.signal and not state.stop)
        if self.saver.step == progress.step:
            self.control.remove("save-now")
        if state.stop:
            self.control.remove("stop")
        if finished and not measured:
            text = "%s left no time to measure the model after step %d, the last one"
            log.warning(text, state.leaving, progress.step)
        if not progress.health.good:
            text = "%s; hpclm checkpoints %s shows which are healthy"
            log.warning(text, progress.health.describe(), files.typed(self.config.out))
        if state.stop == FAILED:
            self.context.run_on_main(self._raise_failure_of_callback)
        next_phase = self.phase_ends(progress) and not state.leaving
        self._record_end(progress, over, requeue, next_phase)
        if not (requeue or next_phase):
            if finished and self.run.notifier and self.context.is_main:
                text = messages.ending(self.config, self.run.data.length, progress, "")
                self.run.notifier.send("finished", text)
            return ExitCode.DONE
        if self.context.is_main:
            why = self.context.job.requeue_if_abandoned()
            if why:
                log.warning("%s: %s was asked to start the job again", why, self.context.job.scheduler)
        return ExitCode.REQUEUE

    def _raise_failure_of_callback(self) -> None:
        """DivergedError, on rank 0."""
        assert self.run.callbacks is not None
        saved = f"step {self.saver.step} is saved" if self.saver.step else "nothing is saved"
        again = f"correct the class, or set its optional = True, then hpclm resume {files.typed(self.config.out)}"
        error = DivergedError(f"{self.run.callbacks.failure}; {saved}; {again}")
        error.shared = True
        raise error

    def _record_end(self, progress: Progress, over: bool, requeue: bool, next_phase: bool) -> None:
        """Log how the attempt ends and what follows, and record it. ``over``: no other attempt is needed. ``next_phase``: the ranks start
        again for it."""
        state = self.control.state
        if requeue:
            then = "nothing saved, exiting; the same command starts again"
            if self.saver.step:
                then = f"saved at step {self.saver.step}, exiting; the same command resumes from here"
            text = f"{state.signal}: {then}"
            log.warning("%s", text)
            code = ExitCode.REQUEUE
            status = "exited"
        elif next_phase:
            text = messages.phase(self.run.data.timeline, progress)
            log.info("%s", text)
            code = ExitCode.REQUEUE
            status = "phase"
        else:
            leaving = "" if over else state.leaving or "exit_interval"
            text = messages.ending(self.config, self.run.data.length, progress, leaving)
            log.info("%s", text)
            code = ExitCode.DONE
            status = text.partition(" ")[0]
        if self.run.meter:
            self.run.meter.summary.end(status, text.partition(";")[0], code, over)
        if self.run.sinks:
            self.run.sinks.code = code

    def _flush(self) -> None:
        """Flush metrics and logs to disk before a checkpoint is published; on rank 0."""
        if self.run.meter:
            self.run.meter.flush()
        folder.sync(self.run.out)
