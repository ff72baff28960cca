"""When a run saves and when it exits, decided alike on every rank; and what follows a signal that comes during a long step.

The log says what follows, and a step that outlasts the time left ends with its process. The watchdog's thread does both: the main
thread is in the step, perhaps inside a library that runs no Python.
"""

import logging
import math
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hpclm.checkpoint import CheckpointStore, Progress
from hpclm.config import CheckpointConfig, RunConfig
from hpclm.config.plan import Length
from hpclm.distributed.watchdog import Watchdog
from hpclm.engine import Engine, keep_going
from hpclm.engine.state import UnsavableStateError
from hpclm.errors import REQUEUE, HpclmError, LockedError
from hpclm.node.preemption import WARNINGS, Preemption
from hpclm.optim.stability import NonfiniteGuard
from hpclm.training.sync import ControlState, ControlSync

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0  # between two polls within a step or an evaluation, about
LATE_STEPS = 3  # steps that may pass until a signal is acted on where answers are read late
MARGIN = 1.5  # a save may take so much longer than the longest one before
LONG = 2.0  # seconds that a step goes on after a signal until the log says what follows
LATE = 5.0  # seconds beyond the time that a signal leaves until the step is given up


class StepAbandoned(Exception):
    """The step was not finished: weights and optimizer state are what they were before it."""


class Saver:
    """Saves a run, in the background or before it exits; one save is on its way at once, and one that fails costs no training."""

    def __init__(
        self,
        store: CheckpointStore,
        settings: CheckpointConfig,
        warn_seconds: float | None = None,
        begin: Progress = Progress(),  # noqa: B008 (it is immutable)
        samples_per_save: float = math.inf,
        flush: Callable[[], None] = lambda: None,
    ):
        """``warn_seconds``: job.warn_seconds. ``begin``: where the run resumes, which is saved. ``samples_per_save``: what
        checkpoint.epochs asks for. ``flush``: called on rank 0 just before a checkpoint is published."""
        self.store, self.settings, self.samples_per_save, self.flush = store, settings, samples_per_save, flush
        self.step = begin.step
        """The newest that is saved."""
        grace = settings.grace_seconds
        self.limits = dict(SIGTERM=grace, SIGUSR1=warn_seconds or grace, SIGUSR2=warn_seconds or grace)
        """Seconds from a signal to the end of this process; nothing follows a Ctrl-C."""
        self._passes = int(begin.samples / samples_per_save)
        self._minutes = self._longest = self._began = self._stalled = 0.0

    def due(self, progress: Progress, state: ControlState) -> bool:
        """Whether the state after this step is to be saved, and is not yet."""
        if not self.settings.enabled:
            return False
        pending = self.store.pending
        newest = pending.progress.step if pending else self.step
        return progress.step > newest and (self._regular(progress, state) or state.save)

    def _regular(self, progress: Progress, state: ControlState) -> bool:
        """Whether checkpoint.every, checkpoint.minutes or checkpoint.epochs ask for a save now."""
        minutes = self.settings.minutes
        timed = minutes is not None and state.minutes - self._minutes >= minutes
        ends_pass = int(progress.samples / self.samples_per_save) > self._passes
        return timed or ends_pass or due(self.settings.every, progress)

    def save(self, engine: Engine, progress: Progress, validation: float | None, state: ControlState) -> None:
        """Save. A failure is logged, and training continues with the earlier checkpoints."""
        self._minutes, self._passes = state.minutes, int(progress.samples / self.samples_per_save)
        try:
            self._begin(engine, progress, validation, self.settings.background)
        except (LockedError, UnsavableStateError):
            raise
        except HpclmError as error:
            log.error("%s; training continues; the checkpoints before it are untouched", error)
        if not self.settings.background:
            self.wait()

    def poll(self, state: ControlState) -> None:
        """Publish what every rank has written meanwhile."""
        if state.written:
            self.wait()

    def wait(self) -> None:
        """Wait for what is on its way, and publish it; every rank must come here. A failure is logged."""
        if not self.store.pending:
            return
        try:
            self._commit()
        except LockedError:
            raise
        except HpclmError as error:
            log.error("%s; training continues; the checkpoints before it are untouched", error)

    def exit(
        self, engine: Engine, progress: Progress, validation: float | None, state: ControlState, again: bool = False
    ) -> None:
        """Save before the run exits, where there is time for it.

        HpclmError when it was and the save failed, unless the run is started ``again``: then that costs some steps, and no run.
        """
        self.wait()
        if progress.step <= self.step or not self.settings.enabled:
            return
        left = self.seconds_left(state)
        if left is not None and self.seconds() > left:
            text = "%s: %.0f s left but saving may take %.1f s; exiting without saving; steps %d to %d will be repeated"
            log.error(text, state.signal, max(left, 0.0), self.seconds(), self.step + 1, progress.step)
            return
        # where nothing else saves, saves at exit are the regular ones
        often = self.settings.every > 0 or self.settings.minutes is not None or self.settings.epochs is not None
        why = state.leaving if often and not self._regular(progress, state) else None
        try:
            self._begin(engine, progress, validation, background=False, why=why)
            self._commit()
        except HpclmError as error:
            if isinstance(error, (LockedError, UnsavableStateError)) or not again:
                raise
            log.error("%s; the steps after %d will be repeated", error, self.step)

    def outcome(self) -> str:
        """What is saved and what follows for a run that exits, for the log."""
        if self.step:
            return f"saved at step {self.step}, exiting; the same command resumes from here"
        return "nothing saved, exiting; the same command starts again"

    def seconds(self) -> float:
        """Seconds that a save may take; 0 before the first."""
        return self._longest * MARGIN

    def seconds_left(self, state: ControlState) -> float | None:
        """Seconds until this process is killed; None if no signal announced it."""
        limits, since = self.limits, state.since
        return min((limits[name] - passed for name, passed in since.items() if name in limits), default=None)

    def _begin(
        self, engine: Engine, progress: Progress, validation: float | None, background: bool, why: str | None = None
    ) -> None:
        self._began = time.monotonic()
        if self.store.pending:
            text = "step %d is still being written: training waits; save less often, or to a faster disk"
            log.warning(text, self.store.pending.progress.step)
            self.wait()
        self.store.begin(engine, progress, validation, background, why)
        self._stalled = time.monotonic() - self._began

    def _commit(self) -> None:
        pending = self.store.pending
        assert pending is not None
        self.store.commit(self.flush)
        self.step, health = pending.progress.step, pending.progress.health
        # all ranks decide alike what there is time for
        (seconds,) = self.store.context.all_reduce_max(time.monotonic() - self._began)
        self._longest = max(self._longest, seconds)
        log.info("saved step %d in %.2f s; training waited %.2f s", self.step, seconds, min(self._stalled, seconds))
        if not health.good:
            log.warning("step %d is saved, and does not replace healthy checkpoints: %s", self.step, health.describe())


class RunControl:
    """Saves and exits, and abandons a step that cannot be finished in time, decided alike on every rank."""

    def __init__(
        self, config: RunConfig, length: Length, engine: Engine, sync: ControlSync, saver: Saver, guard: NonfiniteGuard
    ):
        self.config, self.length, self.engine = config, length, engine
        self.sync, self.saver, self.guard = sync, saver, guard
        self.first_step, self.state = saver.step, ControlState()
        self._save_pending = False
        self._answer: ControlState | None = None
        self._must_synchronize = True
        self._micro_batch = 0.0

    def poll(self) -> None:
        """Poll all ranks for signals and requests, and publish a checkpoint that all have written."""
        self.state = self.sync.poll()
        self._answer, self._must_synchronize = None, False
        self._micro_batch = self.state.micro_batch
        self.saver.poll(self.state)

    def apply(self, answer: ControlState) -> None:
        """Take note of what held on all ranks after the step before the last one."""
        self._answer, self._micro_batch = answer, answer.micro_batch

    def synchronize_soon(self) -> None:
        """Synchronize before the next step."""
        self._must_synchronize = True

    def must_synchronize(self, progress: Progress, micro_batches: int) -> bool:
        """Whether something may have to be done after this step, the next of which has ``micro_batches``."""
        answer = self._answer or ControlState(written=False)
        requested = answer.leaving or answer.save or answer.lost or (answer.written and self.saver.store.pending)
        evaluation = due(self.config.evaluate.every, progress)
        return bool(
            self._must_synchronize or self._save_pending or requested or evaluation or self._ends(progress)
            or self.saver.due(progress, answer) or not self._can_check_signals_late(micro_batches)
        )  # fmt: skip

    def finished(self, progress: Progress) -> bool:
        """Whether the run has used up its budget, or reached ``stop_at``."""
        ends = [end for end in (self.length.steps, self.config.stop_at) if end is not None]
        hours = self.config.budget.hours
        out_of_time = hours is not None and progress.seconds >= hours * 3600
        return out_of_time or any(progress.step >= end for end in ends)

    def exit_is_due(self, progress: Progress) -> bool:
        """Whether the run exits after this step."""
        return self._ends(progress) or bool(self.state.leaving)

    def _ends(self, progress: Progress) -> bool:
        """Whether this attempt was meant to end after this step."""
        interval = due(self.config.exit_interval or 0, progress) and progress.step > self.first_step
        return self.finished(progress) or interval

    def saves_now(self, progress: Progress) -> bool:
        """Whether this turn saves the state after this step, unless it lacks the time."""
        if self.exit_is_due(progress):
            return self.saver.settings.enabled and progress.step > self.saver.step
        self._save_pending = self._save_pending or self.saver.due(progress, self.state)
        return self._save_pending and not self.guard.in_a_row

    def save_if_due(self, progress: Progress, validation: float | None) -> None:
        """Begin a save where one is due. While steps are skipped it waits: what may have diverged must not replace good
        checkpoints. ``validation``: the loss on held-out data after this step, where it was measured."""
        self._save_pending = self._save_pending or self.saver.due(progress, self.state)
        if self._save_pending and not self.guard.in_a_row:
            self.saver.save(self.engine, progress, validation, self.state)
            self._save_pending = False
        if self.state.save and not self._save_pending:
            if not self.saver.settings.enabled:
                log.warning("save-now: checkpoint.enabled=false, so nothing is saved")
            self._remove("save-now")

    def exit(self, progress: Progress, validation: float | None, unmeasured: bool = False) -> int:
        """Save before the run exits; its exit code. ``unmeasured``: a run that has finished needs another start to be measured."""
        over = self.finished(progress) and not unmeasured
        requeue = bool(self.state.signal and not over and not self.state.stop)
        self.saver.exit(self.engine, progress, validation, self.state, requeue)
        if self.saver.step == progress.step:
            self._remove("save-now")
        if self.state.stop:
            self._remove("stop")
        return REQUEUE if requeue else 0

    def _remove(self, request: str) -> None:
        if self.sync.local.control_files:
            self.sync.local.control_files.remove(request)

    def micro_batches_per_poll(self) -> int:
        """Micro-batches of about POLL_SECONDS; 1 before a step's time is known."""
        return max(1, round(POLL_SECONDS / self._micro_batch)) if self._micro_batch else 1

    def _can_check_signals_late(self, micro_batches: int) -> bool:
        """Whether there is time to save even where all ranks hear of a signal only after another step of so many micro-batches.
        Before a step's time is known, and where steps are long, there is not."""
        late, save = LATE_STEPS * micro_batches * self._micro_batch, self.saver.seconds()
        return late > 0 and not any(save < limit <= save + late for limit in self.saver.limits.values())

    def check_interrupt(self, micro_batches: int) -> Callable[[int], None]:
        """What a step of so many micro-batches calls between two of them, with how many are done.

        It raises StepAbandoned on every rank where the rest of the step, and a save, would take longer than there is.
        """
        if self._can_check_signals_late(micro_batches):
            return keep_going
        began, every = time.monotonic(), self.micro_batches_per_poll()

        def check(done: int) -> None:
            if done % every:
                return
            state = self.sync.poll()
            left, remaining = self.saver.seconds_left(state), micro_batches - done
            if left is None:
                return
            (needed,) = self.sync.context.all_reduce_max((time.monotonic() - began) / done * remaining)
            if needed + self.saver.seconds() < left:
                return
            text = "%s: %.0f s left but the other %d of %d micro-batches may take %.0f s; step abandoned; it will be redone"
            log.warning(text, state.signal, left, remaining, micro_batches, needed)
            raise StepAbandoned

        return check


def due(every: int, progress: Progress) -> bool:
    """Whether something that happens ``every`` steps happens now; 0 is never."""
    return bool(every) and progress.step > 0 and progress.step % every == 0


class SignalWatch:
    """Called again and again while a run trains."""

    def __init__(self, config: RunConfig, preemption: Preemption, saver: Saver, watchdog: Watchdog):
        self.out, self.warns, self.grace = Path(config.out), config.job.warn_seconds, config.checkpoint.grace_seconds
        self.preemption, self.saver, self.watchdog = preemption, saver, watchdog
        self._announced = False

    def __call__(self) -> None:
        """Say what follows a signal, once, or end this process, if a step is going on all that time."""
        since = {name: self.preemption.seconds(name) for name in (number.name for number in WARNINGS)}
        name = max(since, key=lambda each: since[each])
        if not since[name] or not self.watchdog.in_step:
            return
        limits = self.saver.limits
        for late, limit in limits.items():
            if since.get(late, 0) > limit + LATE:
                self.watchdog.end(
                    f"{late}: step {self.watchdog.step} has gone on for {since[late]:.0f} s since, and {self._setting(late)} has "
                    f"passed: exiting without saving; the steps after {self.saver.step} will be repeated"
                )
        if since[name] >= LONG and not self._announced:
            self._announced = True
            left = f" within {self._setting(name)}" if name in limits else ""
            end = f"hpclm cancel --now {shlex.quote(str(self.out))}"
            sooner = "press Ctrl-C again" if name == signal.SIGINT.name else end
            log.warning(
                "%s: once step %d ends%s, the run saves, if there is time, and exits; to end it sooner, without saving: %s",
                name,
                self.watchdog.step,
                left,
                sooner,
            )

    def _setting(self, name: str) -> str:
        """The setting that says how many seconds the signal leaves."""
        warned = name != signal.SIGTERM.name and self.warns
        return f"job.warn_seconds={self.warns}" if warned else f"checkpoint.grace_seconds={self.grace:g}"
