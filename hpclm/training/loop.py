"""The training loop: train a step and record it, then evaluate, verify, save and exit as they come due.

Nothing in it knows an engine, a launcher or a data format. All ranks take the same turns, because they decide by agreed values.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from hpclm import files
from hpclm.checkpoint import Progress
from hpclm.diagnostics import corruption
from hpclm.distributed.context import DistributedContext
from hpclm.errors import DivergedError, ExitCode
from hpclm.rundir import folder
from hpclm.training import messages
from hpclm.training.control import Control, ControlState, Milestones
from hpclm.training.evaluation import Evaluator
from hpclm.training.opening import MemoryPlanner, OpenRun, open_run, samples_per_save
from hpclm.training.saver import Saver, SignalWatch
from hpclm.training.start import RunStart
from hpclm.training.step import StepAbandoned, Stepper

log = logging.getLogger(__name__)


def run(start: RunStart, context: DistributedContext, planner: MemoryPlanner | None = None) -> int:
    """Train until the budget is used up, ``stop_at`` is reached or a signal warns; the exit code.

    Every rank of ``context`` runs this, and all take every turn together. ``planner``: for batch.micro_size=auto, and to explain a lack of
    memory.
    """
    with open_run(start, context, planner) as opened:
        return TrainingLoop(opened).train()


class TrainingLoop:
    """The loop of a run that is open on this rank."""

    def __init__(self, run: OpenRun):
        config, context, begin = run.config, run.context, run.data.begin
        self.run = run
        self.config = config
        self.context = context
        self.engine = run.engine
        self.milestones = Milestones(config, run.data.length, begin.step)
        per_save = samples_per_save(config, run.data)
        self.saver = Saver(run.store, config.checkpoint, config.job.warn_seconds, begin, per_save, self._flush)
        self.control = Control(
            config, context, run.compute, run.engine, run.store, run.preemption, run.lease, begin.seconds
        )
        self.verifier = corruption.verifier(run.engine, run.compute.mesh, context, config.cluster.verify_every)
        self.stepper = Stepper(run, self.control, self.saver, self.verifier)
        self.evaluator = Evaluator(run)
        context.watchdog.each_turn = SignalWatch(config, context.watchdog, run.preemption, self.saver)

    def train(self) -> int:
        """Take turns until the run exits; the exit code."""
        progress = self.run.data.begin
        while True:
            if self.work_is_due(progress):  # otherwise the next step is queued before the last one is known
                progress = self.finish_step(progress)
                if self.milestones.evaluates(progress):
                    self.evaluate(progress)
                exits = self.exit_is_due(progress)
                saves = self.save_is_due(progress, exits)
                if self.verifier and (saves or self.milestones.verifies(progress)):
                    self.verify(progress)
                if exits:
                    return self.exit(progress)
                if saves:
                    self.save(progress)
                self.answer_save_request()
            try:
                progress = self.step(progress)
            except StepAbandoned:
                continue  # a signal leaves no time to finish the step, so the next turn exits

    def work_is_due(self, progress: Progress) -> bool:
        """Whether the run may have something else to do after this step than to train the next."""
        news = self.control.news or ControlState(written=False)
        requested = news.leaving or news.save or news.lost or (news.written and self.run.store.pending)
        planned = self.milestones.ends(progress) or self.milestones.evaluates(progress)
        verifies = self.verifier is not None and self.milestones.verifies(progress)
        # after a short signal, or a long step, the run must not train another step before it saves
        micro_batches = self.run.data.plan.accumulation(progress.samples)
        urgent = not self.stepper.signals_can_wait(micro_batches)
        return bool(requested or planned or verifies or urgent or self.saver.due(progress, news))

    def step(self, progress: Progress) -> Progress:
        """Train on the next batch, and record the step before; see Stepper.step."""
        with self._pending_save_published():
            return self.stepper.step(progress)

    def finish_step(self, progress: Progress) -> Progress:
        """Wait for the last step, record it, and agree with all ranks on what to do; returns the progress. DivergedError may end the run."""
        with self._pending_save_published():
            self.stepper.finish()
        state = self.poll()
        self.stepper.check_compilations(state)
        guard = self.stepper.guard
        return replace(progress, seconds=state.trained, skipped=guard.skipped, health=guard.health)

    def poll(self) -> ControlState:
        """Agree with all ranks on signals and requests, and publish a checkpoint that all have written."""
        state = self.control.poll()
        if state.written:
            self.saver.wait()
        return state

    def evaluate(self, progress: Progress) -> None:
        """Measure the loss on held-out data, until a signal or request ends the run."""
        self.context.watchdog.enter("evaluation", progress.step)
        every = self.stepper.micro_batches_per_poll()
        self.evaluator.evaluate(progress, every, lambda: bool(self.control.ask().leaving))
        self.poll()

    def exit_is_due(self, progress: Progress) -> bool:
        """Whether the run exits after this step."""
        return self.milestones.ends(progress) or bool(self.control.state.leaving)

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

    def verify(self, progress: Progress) -> None:
        """Look for silent corruption; CorruptedError if there is some, and DivergedError if the user's own code may have caused it."""
        assert self.verifier is not None
        self.context.watchdog.enter("verification", progress.step)
        problems = self.verifier.check(recompute=not self.control.state.signal)  # after a signal, time is short
        if problems:
            self.saver.wait()  # the pending save is good
            step, saved, own_code = progress.step, self.saver.step, self.config.code_of_training()
            if own_code:
                corruption.blame_program(problems, step, saved, own_code, self.context)
            corruption.end_run(problems, step, saved, self.context, self.run.compute.device, self.run.out)

    def save(self, progress: Progress) -> None:
        """Begin a save, or save, by checkpoint.background."""
        self.saver.save(self.engine, progress, self.evaluator.validation(progress.step), self.control.state)

    def answer_save_request(self) -> None:
        """Remove a save-now request that has been carried out, or cannot be."""
        if self.control.state.save and not self.saver.postponed:
            if not self.config.checkpoint.enabled:
                log.warning("request to save: checkpoint.enabled=false, so nothing is saved")
            self.control.remove("save-now")

    def exit(self, progress: Progress) -> int:
        """Save, and record how the attempt ends; the exit code."""
        state, finished = self.control.state, self.milestones.finished(progress)
        if self.run.meter:
            self.run.meter.flush()
        if finished:
            with self._pending_save_published():
                self.stepper.guard.check_end(progress.step, self.evaluator.measured(progress.step))
        self.context.watchdog.enter("save", progress.step)
        unmeasured = finished and not self.evaluator.is_complete(progress.step)  # which takes another start
        over = finished and not unmeasured
        requeue = bool(state.signal and not over and not state.stop)
        self.saver.exit(self.engine, progress, self.evaluator.validation(progress.step), state, requeue)
        if self.saver.step == progress.step:
            self.control.remove("save-now")
        if state.stop:
            self.control.remove("stop")
        code = ExitCode.REQUEUE if requeue else ExitCode.DONE
        summary, ending = self._log_end(progress, code, over, unmeasured)
        self._record_end(summary, ending, code, over)
        if self.run.notifier and self.context.is_main and finished and not code:
            text = messages.ending(self.config, self.run.data.length, progress, "")
            self.run.notifier.send("finished", text)
        if code and self.context.is_main and (why := self.context.job.requeue_if_abandoned()):
            log.warning("%s: %s was asked to start the job again", why, self.context.job.scheduler)
        return code

    def _log_end(self, progress: Progress, code: int, over: bool, unmeasured: bool) -> tuple[str, str]:
        """Log how the attempt ends, and what follows; returns its state and ending for summary.json.

        ``over``: no other attempt is needed. ``unmeasured``: the budget is used up, but the last step has yet to be measured.
        """
        state = self.control.state
        if unmeasured:
            log.warning(
                "%s left no time to measure the model after step %d, the last one", state.leaving, progress.step
            )
        if not progress.health.good:
            text = "%s; hpclm checkpoints %s shows which are healthy"
            log.warning(text, progress.health.describe(), files.typed(self.config.out))
        if code:
            saved = f"saved at step {self.saver.step}, exiting; the same command resumes from here"
            nothing = "nothing saved, exiting; the same command starts again"
            text = f"{state.signal}: {saved if self.saver.step else nothing}"
            log.warning("%s", text)
            return "exited", text.partition(";")[0]
        leaving = "" if over else state.leaving or "exit_interval"
        text = messages.ending(self.config, self.run.data.length, progress, leaving)
        log.info("%s", text)
        return text.partition(" ")[0], text.partition(";")[0]

    def _record_end(self, summary: str, ending: str, code: int, over: bool) -> None:
        if self.run.meter:
            self.run.meter.end(summary, ending, code, over)
        if self.run.sinks:
            self.run.sinks.code = code

    def _flush(self) -> None:
        """Have metrics and logs on the disk, before a checkpoint is published; on rank 0."""
        if self.run.meter:
            self.run.meter.flush()
        folder.sync(self.run.out)

    @contextmanager
    def _pending_save_published(self) -> Iterator[None]:
        """If the run diverges in the block, which it does on every rank, publish the pending save first: its state was good.

        Any other error may be this rank's alone, so nothing waits for the others.
        """
        try:
            yield
        except DivergedError as error:
            try:
                self.stepper.finish()  # the step before it, if it is not recorded yet
            finally:
                self.saver.wait()
            raise DivergedError(f"{error}. {messages.way_back(self.config)}") from None
        except StepAbandoned:
            raise
        except Exception:
            with suppress(Exception):  # an error in here must not hide the first one
                self.stepper.finish_if_arrived()
            raise
