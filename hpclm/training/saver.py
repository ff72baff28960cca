"""When a run saves, and how much time a signal leaves for that."""

import logging
import math
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpclm.base.errors import HpclmError, LockedError
from hpclm.checkpoint import CheckpointStore, Progress
from hpclm.config import CheckpointConfig, RunConfig
from hpclm.distributed.watchdog import Watchdog
from hpclm.engine import StateSource
from hpclm.engine.state import UnsavableStateError
from hpclm.node.preemption import Preemption
from hpclm.training.control import SIGNALS, ControlState

log = logging.getLogger(__name__)
MARGIN = 1.5  # a save may take this many times as long as the longest one before
LONG = 2.0  # seconds after a signal until the log says what follows, if the step goes on
LATE = 5.0  # seconds after the deadline of a signal until the run exits without saving


def due(every: int, progress: Progress) -> bool:
    """Whether something that happens every ``every`` steps is due after this one; 0: never."""
    return every > 0 and progress.step > 0 and progress.step % every == 0


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
        self.step = begin.step  # the newest step that is saved
        self.postponed = False  # a save is due, but waits until steps are no longer skipped
        grace = settings.grace_seconds
        self.limits = dict(SIGTERM=grace, SIGUSR1=warn_seconds or grace, SIGUSR2=warn_seconds or grace)
        """Seconds from a signal to the end of this process, by the signal's name. Ctrl-C has no limit."""
        self._saved_minutes = 0.0  # ControlState.minutes at the last save
        self._saved_passes = self._passes(begin)
        self._began = 0.0  # when the pending save began, by time.monotonic
        self._waited = 0.0  # seconds that training waited for it
        self._longest = 0.0  # seconds of the longest save, by the slowest rank

    def _passes(self, progress: Progress) -> int:
        """Number of times that the run has read checkpoint.epochs epochs."""
        return int(progress.samples / self.samples_per_save)

    def due(self, progress: Progress, state: ControlState) -> bool:
        """Whether a save is due after this step and has not begun yet."""
        if not self.settings.enabled:
            return False
        pending = self.store.pending
        newest = pending.progress.step if pending else self.step
        return progress.step > newest and (self.postponed or state.save or self._periodic(progress, state))

    def _periodic(self, progress: Progress, state: ControlState) -> bool:
        """Whether checkpoint.every, checkpoint.minutes or checkpoint.epochs ask for a save after this step."""
        minutes = self.settings.minutes
        if minutes is not None and state.minutes - self._saved_minutes >= minutes:
            return True
        return self._passes(progress) > self._saved_passes or due(self.settings.every, progress)

    def save(self, engine: StateSource, progress: Progress, validation: float | None, state: ControlState) -> None:
        """Save; with checkpoint.background, begin to save. A failure is logged, and training continues with the earlier checkpoints."""
        self.postponed = False
        self._saved_minutes = state.minutes
        self._saved_passes = self._passes(progress)
        with self._failures_logged():
            self._begin(engine, progress, validation, self.settings.background)
        if not self.settings.background:
            self.wait()

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
        self._waited = time.monotonic() - self._began

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        try:
            yield
        except (LockedError, UnsavableStateError):
            raise
        except HpclmError as error:
            log.error("%s; training continues; the checkpoints before it are untouched", error)

    def wait(self) -> None:
        """Wait for the pending save, if any, and publish it; a collective. A failure is logged."""
        if self.store.pending:
            with self._failures_logged():
                self._commit()

    def _commit(self) -> None:
        assert self.store.pending is not None
        progress = self.store.pending.progress
        self.store.commit(self.flush)
        self.step = progress.step
        # every rank must expect the same
        (seconds,) = self.store.context.all_reduce_max(time.monotonic() - self._began)
        self._longest = max(self._longest, seconds)
        log.info("saved step %d in %.2f s; training waited %.2f s", self.step, seconds, min(self._waited, seconds))
        if not progress.health.good:
            reason = progress.health.describe()
            log.warning("step %d is saved, and does not replace healthy checkpoints: %s", self.step, reason)

    def exit(
        self,
        engine: StateSource,
        progress: Progress,
        validation: float | None,
        state: ControlState,
        requeue: bool = False,
    ) -> None:
        """Save before the run exits, if there is time.

        HpclmError if the save fails. With ``requeue`` a failure is only logged: the run starts again and repeats some steps.
        """
        self.wait()
        if progress.step <= self.step or not self.settings.enabled:
            return
        left = self.seconds_left(state)
        if left is not None and self.seconds() > left:
            text = "%s: %.0f s left but saving may take %.1f s; exiting without saving; steps %d to %d will be repeated"
            log.error(text, state.signal, max(left, 0.0), self.seconds(), self.step + 1, progress.step)
            return
        try:
            self._begin(engine, progress, validation, background=False, why=self._reason(progress, state))
            self._commit()
        except HpclmError as error:
            if isinstance(error, (LockedError, UnsavableStateError)) or not requeue:
                raise
            log.error("%s; the steps after %d will be repeated", error, self.step)

    def _reason(self, progress: Progress, state: ControlState) -> str | None:
        """The reason for a save at exit; None if the save counts as a periodic one."""
        saves_at_exit_only = not self.settings.every and self.settings.minutes is None and self.settings.epochs is None
        if saves_at_exit_only or self._periodic(progress, state):
            return None
        return state.leaving

    def seconds(self) -> float:
        """Seconds that a save may take; 0 before the first."""
        return self._longest * MARGIN

    def seconds_left(self, state: ControlState) -> float | None:
        """Seconds until this process is killed; None if no signal announced it."""
        left = [limit - state.since[name] for name, limit in self.limits.items() if name in state.since]
        return min(left, default=None)

    def may_begin_after(self, seconds: float) -> bool:
        """Whether a save could still finish in time if it began ``seconds`` after a signal. Limits too short for any save do not count."""
        return not any(self.seconds() < limit <= self.seconds() + seconds for limit in self.limits.values())


@dataclass
class SignalWatch:
    """Acts on a signal during a step that does not end: logs what follows, and in the end exits without saving.

    The watchdog's thread calls it a few times a second. The main thread is in the step, perhaps inside a library that runs no Python.
    """

    config: RunConfig
    watchdog: Watchdog
    preemption: Preemption
    saver: Saver
    announced: bool = False

    def __call__(self) -> None:
        """Check the signals and the time since the first one."""
        since = {name: self.preemption.seconds(name) for name in SIGNALS}
        first = max(since, key=lambda name: since[name])
        if not since[first] or not self.watchdog.in_step:
            return
        for name, limit in self.saver.limits.items():
            if since[name] > limit + LATE:
                self.watchdog.ending.stop(
                    f"{name}: step {self.watchdog.step} has gone on for {since[name]:.0f} s since the signal, and {self._limit(name)} has "
                    f"passed: exiting without saving; the steps after {self.saver.step} will be repeated"
                )
        if since[first] >= LONG and not self.announced:
            self.announced = True
            self._announce(first)

    def _announce(self, name: str) -> None:
        """Log what follows the signal ``name``."""
        within = f" within {self._limit(name)}," if name in self.saver.limits else ""
        sooner = f"hpclm cancel --now {shlex.quote(str(Path(self.config.out)))}"
        if name == signal.SIGINT.name:
            sooner = "press Ctrl-C again"
        text = "%s: after step %d or the next one,%s the run saves, if there is time, and exits; to end it sooner, without saving: %s"
        log.warning(text, name, self.watchdog.step, within, sooner)

    def _limit(self, name: str) -> str:
        """The setting that says how many seconds the signal leaves."""
        warn_seconds = self.config.job.warn_seconds
        if warn_seconds and name != signal.SIGTERM.name:
            return f"job.warn_seconds={warn_seconds}"
        return f"checkpoint.grace_seconds={self.config.checkpoint.grace_seconds:g}"
