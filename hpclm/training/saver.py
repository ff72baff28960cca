"""Saves a run, in the background or before it exits; a save that fails costs no training."""

import logging
import math
import time
from collections.abc import Callable

from hpclm.checkpoint import CheckpointStore, Progress
from hpclm.config import RunConfig
from hpclm.engine import Engine
from hpclm.errors import HpclmError, LockedError
from hpclm.optim.health import Health
from hpclm.training.state import ControlState

log = logging.getLogger(__name__)
MARGIN = 1.5  # a save may take so much longer than the longest one before


class Saver:
    """Saves a run's state when it is time; one save is on its way at once, and one that failed costs no training."""

    def __init__(
        self,
        store: CheckpointStore,
        config: RunConfig,
        step: int,
        samples: int = 0,
        per_pass: float = math.inf,
        flush: Callable[[], None] = lambda: None,
    ):
        """``step`` and ``samples``: where the run resumes, which is saved. ``per_pass``: samples between saves that
        checkpoint.epochs asks for. ``flush``: called on rank 0 just before a checkpoint is published."""
        self.flush = flush
        self.store, self.config, self.step, self.per_pass = store, config, step, per_pass
        grace = config.checkpoint.grace_seconds
        warned = config.job.warn_seconds or grace
        self.limits = {"SIGTERM": grace, "SIGUSR1": warned, "SIGUSR2": warned}
        """Seconds from a signal to the end of this process; nothing follows a Ctrl-C."""
        self._passes = int(samples / per_pass)
        self._minutes = 0.0
        self._longest = 0.0
        self._began = 0.0
        self._stalled = 0.0
        self._before = step

    def due(self, progress: Progress, state: ControlState) -> bool:
        """Whether the state after this step is to be saved, and is not yet."""
        if not self.config.checkpoint.enabled:
            if state.save:
                log.warning("save-now: checkpoint.enabled=false, so nothing is saved")
            return False
        return progress.step > self.step and (self._regular(progress, state) or state.save)

    def _regular(self, progress: Progress, state: ControlState) -> bool:
        """Whether checkpoint.every, checkpoint.minutes or checkpoint.epochs ask for a save now."""
        settings = self.config.checkpoint
        timed = settings.minutes is not None and state.minutes - self._minutes >= settings.minutes
        ends_pass = int(progress.samples / self.per_pass) > self._passes
        return timed or ends_pass or (settings.every > 0 and progress.step > 0 and progress.step % settings.every == 0)

    def save(self, engine: Engine, progress: Progress, validation: float | None, state: ControlState) -> None:
        """Save. A failure is logged, and training continues with the earlier checkpoints."""
        self._minutes, self._passes = state.minutes, int(progress.samples / self.per_pass)
        try:
            self._begin(engine, progress, validation, background=self.config.checkpoint.background)
            if not self.config.checkpoint.background:
                self._commit()
        except LockedError:
            raise
        except HpclmError as error:
            log.error("%s; training continues; the checkpoints before it are untouched", error)

    def poll(self, state: ControlState) -> None:
        """Publish what every rank has written meanwhile."""
        if self.store.pending and state.written:
            self._finish_pending()

    def wait(self) -> None:
        """Wait for what is on its way, and publish it; every rank must come here."""
        if self.store.pending:
            self._finish_pending()

    def exit(
        self, engine: Engine, progress: Progress, validation: float | None, state: ControlState, again: bool = False
    ) -> None:
        """Save before the run exits, where there is time for it.

        HpclmError when it was and the save failed, unless the run is started ``again``: then that costs some steps, and no run.
        """
        self.wait()
        if progress.step <= self.step or not self.config.checkpoint.enabled:
            return
        left = self.seconds_left(state)
        if left is not None and self.seconds() > left:
            text = "%s: %.0f s left but saving may take %.1f s; exiting without saving; steps %d to %d will be repeated"
            log.error(text, state.signal, max(left, 0.0), self.seconds(), self.step + 1, progress.step)
            return
        # where nothing else saves, saves at exit are the regular ones
        settings = self.config.checkpoint
        often = settings.every > 0 or settings.minutes is not None or settings.epochs is not None
        why = state.leaving if often and not self._regular(progress, state) else None
        try:
            self._begin(engine, progress, validation, background=False, why=why)
            self._commit()
        except HpclmError as error:
            if isinstance(error, LockedError) or not again:
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
            log.warning(
                "step %d is still being written: training waits; save less often, or to a faster disk", self.step
            )
            self._finish_pending()
        self.store.begin(engine, progress, validation, background, why)
        self._before, self.step = self.step, progress.step
        self._stalled = time.monotonic() - self._began

    def _commit(self) -> None:
        health = self.store.pending.progress.health if self.store.pending else Health()
        try:
            self.store.commit(self.flush)
        except HpclmError:
            self.step = self._before
            raise
        seconds = self.store.context.all_reduce_max(time.monotonic() - self._began)[
            0
        ]  # all decide alike what there is time for
        self._longest = max(self._longest, seconds)
        log.info("saved step %d in %.2f s; training waited %.2f s", self.step, seconds, min(self._stalled, seconds))
        if not health.good:
            log.warning("step %d is saved, and does not replace healthy checkpoints: %s", self.step, health.words())

    def _finish_pending(self) -> None:
        try:
            self._commit()
        except LockedError:
            raise
        except HpclmError as error:
            log.error("%s; training continues; the checkpoints before it are untouched", error)
