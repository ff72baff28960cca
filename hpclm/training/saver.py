"""When a run saves, and how much time a signal leaves for that."""

import logging
import math
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpclm.checkpoint import CheckpointStore, Progress
from hpclm.config import CheckpointConfig, RunConfig
from hpclm.distributed.watchdog import Watchdog
from hpclm.engine import StateSource
from hpclm.engine.state import UnsavableStateError
from hpclm.errors import HpclmError, LockedError
from hpclm.node.preemption import Preemption
from hpclm.training.control import SIGNALS, ControlState, due

log = logging.getLogger(__name__)
MARGIN = 1.5  # a save may take this many times as long as the longest one before
LONG = 2.0  # seconds that a step goes on after a signal until the log says what follows
LATE = 5.0  # seconds beyond the time that a signal leaves until the step is given up


class Saver:
    """Saves a run, in the background or before it exits. One save is pending at a time, and a failed one does not stop training."""

    def __init__(
        self,
        store: CheckpointStore,
        settings: CheckpointConfig,
        warn_seconds: float | None = None,
        begin: Progress = Progress(),  # noqa: B008 (it is immutable)
        samples_per_save: float = math.inf,
        flush: Callable[[], None] = lambda: None,
    ):
        """``warn_seconds``: job.warn_seconds. ``begin``: the progress that the run resumes from, which is saved. ``samples_per_save``: see
        checkpoint.epochs. ``flush``: called on rank 0 just before a checkpoint is published."""
        self.store = store
        self.settings = settings
        self.samples_per_save = samples_per_save
        self.flush = flush
        self.step = begin.step
        """The newest step that is saved."""
        grace = settings.grace_seconds
        self.limits = dict(SIGTERM=grace, SIGUSR1=warn_seconds or grace, SIGUSR2=warn_seconds or grace)
        """Seconds from a signal to the end of this process; nothing follows a Ctrl-C."""
        self.postponed = False
        """A save is due and waits until steps are no longer skipped."""
        self._passes = int(begin.samples / samples_per_save)
        self._minutes = self._longest = self._began = self._stalled = 0.0

    def due(self, progress: Progress, state: ControlState) -> bool:
        """True if a save is due after this step and has not begun yet."""
        if not self.settings.enabled:
            return False
        pending = self.store.pending
        newest = pending.progress.step if pending else self.step
        return progress.step > newest and (self.postponed or state.save or self._regular(progress, state))

    def _regular(self, progress: Progress, state: ControlState) -> bool:
        """Whether checkpoint.every, checkpoint.minutes or checkpoint.epochs ask for a save now."""
        minutes = self.settings.minutes
        timed = minutes is not None and state.minutes - self._minutes >= minutes
        ends_pass = int(progress.samples / self.samples_per_save) > self._passes
        return timed or ends_pass or due(self.settings.every, progress)

    def save(self, engine: StateSource, progress: Progress, validation: float | None, state: ControlState) -> None:
        """Save. A failure is logged, and training continues with the earlier checkpoints."""
        self.postponed = False
        self._minutes = state.minutes
        self._passes = int(progress.samples / self.samples_per_save)
        with self._failures_logged():
            self._begin(engine, progress, validation, self.settings.background)
        if not self.settings.background:
            self.wait()

    def wait(self) -> None:
        """Wait for the pending save, and publish it; a collective. A failure is logged."""
        if self.store.pending:
            with self._failures_logged():
                self._commit()

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        try:
            yield
        except (LockedError, UnsavableStateError):
            raise
        except HpclmError as error:
            log.error("%s; training continues; the checkpoints before it are untouched", error)

    def exit(
        self,
        engine: StateSource,
        progress: Progress,
        validation: float | None,
        state: ControlState,
        again: bool = False,
    ) -> None:
        """Save before the run exits, if there is time.

        HpclmError if the save fails, unless the run is started ``again``: then only some steps are lost.
        """
        self.wait()
        if progress.step <= self.step or not self.settings.enabled:
            return
        left = self.seconds_left(state)
        if left is not None and self.seconds() > left:
            text = "%s: %.0f s left but saving may take %.1f s; exiting without saving; steps %d to %d will be repeated"
            log.error(text, state.signal, max(left, 0.0), self.seconds(), self.step + 1, progress.step)
            return
        # if nothing else saves, saves at exit are the regular ones
        often = self.settings.every > 0 or self.settings.minutes is not None or self.settings.epochs is not None
        why = state.leaving if often and not self._regular(progress, state) else None
        try:
            self._begin(engine, progress, validation, background=False, why=why)
            self._commit()
        except HpclmError as error:
            if isinstance(error, (LockedError, UnsavableStateError)) or not again:
                raise
            log.error("%s; the steps after %d will be repeated", error, self.step)

    def seconds(self) -> float:
        """Seconds that a save may take; 0 before the first."""
        return self._longest * MARGIN

    def seconds_left(self, state: ControlState) -> float | None:
        """Seconds until this process is killed; None if no signal announced it."""
        limits, since = self.limits, state.since
        return min((limits[name] - passed for name, passed in since.items() if name in limits), default=None)

    def may_begin_after(self, seconds: float) -> bool:
        """Whether a save could still finish in time if it began ``seconds`` after a signal. Saves that never fit do not count."""
        return not any(self.seconds() < limit <= self.seconds() + seconds for limit in self.limits.values())

    def _begin(
        self,
        engine: StateSource,
        progress: Progress,
        validation: float | None,
        background: bool,
        why: str | None = None,
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
        # all ranks must agree on what there is time for
        (seconds,) = self.store.context.all_reduce_max(time.monotonic() - self._began)
        self._longest = max(self._longest, seconds)
        log.info("saved step %d in %.2f s; training waited %.2f s", self.step, seconds, min(self._stalled, seconds))
        if not health.good:
            log.warning("step %d is saved, and does not replace healthy checkpoints: %s", self.step, health.describe())


class SignalWatch:
    """Acts on a signal during a step that does not end: the log says what follows, and at last this process ends.

    The watchdog's thread calls it again and again: the main thread is in the step, perhaps inside a library that runs no Python.
    """

    def __init__(self, config: RunConfig, watchdog: Watchdog, preemption: Preemption, saver: Saver):
        self.config = config
        self.watchdog = watchdog
        self.preemption = preemption
        self.saver = saver
        self._announced = False

    def __call__(self) -> None:
        """Check once."""
        watchdog, limits = self.watchdog, self.saver.limits
        since = {name: self.preemption.seconds(name) for name in SIGNALS}
        first = max(since, key=lambda name: since[name])
        if not since[first] or not watchdog.in_step:
            return
        for name, limit in limits.items():
            if since.get(name, 0) > limit + LATE:
                watchdog.ending.stop(
                    f"{name}: step {watchdog.step} has gone on for {since[name]:.0f} s since, and {self._setting(name)} has "
                    f"passed: exiting without saving; the steps after {self.saver.step} will be repeated"
                )
        if since[first] >= LONG and not self._announced:
            self._announced = True
            left = f" within {self._setting(first)}" if first in limits else ""
            end = f"hpclm cancel --now {shlex.quote(str(Path(self.config.out)))}"
            sooner = "press Ctrl-C again" if first == signal.SIGINT.name else end
            text = "%s: once step %d ends%s, the run saves, if there is time, and exits; to end it sooner, without saving: %s"
            log.warning(text, first, watchdog.step, left, sooner)

    def _setting(self, name: str) -> str:
        """The setting that says how many seconds the signal leaves."""
        warned = self.config.job.warn_seconds if name != signal.SIGTERM.name else None
        grace = f"checkpoint.grace_seconds={self.config.checkpoint.grace_seconds:g}"
        return f"job.warn_seconds={warned}" if warned else grace
