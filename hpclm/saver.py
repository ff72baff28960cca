"""When a run saves, and what becomes of it when that fails."""

import logging
import time

from hpclm.agreement import Orders
from hpclm.checkpoint import CheckpointStore, Progress
from hpclm.config import RunConfig
from hpclm.engine import Engine
from hpclm.errors import HpclmError, LockedError

log = logging.getLogger(__name__)
MARGIN = 1.5  # a save may take so much longer than the longest one before


class Saver:
    """Saves a run's state when it is time; one save is on its way at once, and one that failed costs no training."""

    def __init__(self, store: CheckpointStore, config: RunConfig, step: int):
        """``step``: the one the run goes on from, which is saved."""
        self.store, self.config, self.step = store, config, step
        self._minutes = 0.0
        self._longest = 0.0
        self._began = 0.0
        self._stalled = 0.0
        self._before = step

    def due(self, progress: Progress, orders: Orders) -> bool:
        """Whether the state after this step is to be saved, and is not yet."""
        return progress.step > self.step and (self._regular(progress, orders) or orders.save)

    def _regular(self, progress: Progress, orders: Orders) -> bool:
        """Whether checkpoint.every or checkpoint.minutes ask for a save now."""
        settings = self.config.checkpoint
        timed = settings.minutes is not None and orders.minutes - self._minutes >= settings.minutes
        return timed or (settings.every > 0 and progress.step > 0 and progress.step % settings.every == 0)

    def save(self, engine: Engine, progress: Progress, validation: float | None, orders: Orders) -> None:
        """Save; a failure is told, and training goes on with the checkpoints before it."""
        self._minutes = orders.minutes
        try:
            self._begin(engine, progress, validation, beside=self.config.checkpoint.background)
            if not self.config.checkpoint.background:
                self._commit()
        except LockedError:
            raise
        except HpclmError as error:
            log.error("%s; training goes on, the checkpoints before it are untouched", error)

    def settle(self, orders: Orders) -> None:
        """Publish what every rank has written meanwhile."""
        if self.store.flight and orders.written:
            self._finish_flight()

    def land(self) -> None:
        """Wait for what is on its way, and publish it; every rank must come here."""
        if self.store.flight:
            self._finish_flight()

    def leave(
        self, engine: Engine, progress: Progress, validation: float | None, orders: Orders, again: bool = False
    ) -> None:
        """Save before the run leaves, where the time is enough for it.

        HpclmError when it was and the save failed, unless the run is started ``again``: then that costs some steps, and no run.
        """
        self.land()
        if progress.step <= self.step:
            return
        left = self.seconds_left(orders)
        if left is not None and self.seconds() > left:
            log.error(
                "%s leaves %.0f s, and saves took up to %.1f s: left without one; steps %d to %d will be done again",
                orders.signal,
                left,
                self._longest,
                self.step + 1,
                progress.step,
            )
            return
        # where nothing else saves, those made when leaving are the regular ones
        often = self.config.checkpoint.every > 0 or self.config.checkpoint.minutes is not None
        why = orders.leaving if often and not self._regular(progress, orders) else None
        try:
            self._begin(engine, progress, validation, beside=False, why=why)
            self._commit()
        except HpclmError as error:
            if isinstance(error, LockedError) or not again:
                raise
            log.error("%s; the steps after %d will be done again", error, self.step)

    def told(self) -> str:
        """What is saved, in words."""
        return f"saved at step {self.step}" if self.step else "nothing saved"

    def seconds(self) -> float:
        """Seconds that a save may take; 0 before the first."""
        return self._longest * MARGIN

    def seconds_left(self, orders: Orders) -> float | None:
        """Seconds until this process is killed; None where nobody has said that it will be."""
        grace = self.config.checkpoint.grace_seconds
        warned = self.config.job.warn_seconds or grace
        limits = {"SIGTERM": grace, "SIGUSR1": warned, "SIGUSR2": warned}  # after a Ctrl-C nobody kills
        return min((limits[name] - passed for name, passed in orders.since.items() if name in limits), default=None)

    def _begin(
        self, engine: Engine, progress: Progress, validation: float | None, beside: bool, why: str | None = None
    ) -> None:
        self._began = time.monotonic()
        if self.store.flight:
            log.warning(
                "step %d is still being written: training waits; save less often, or to a faster disk", self.step
            )
            self._finish_flight()
        self.store.begin(engine, progress, validation, beside, why)
        self._before, self.step = self.step, progress.step
        self._stalled = time.monotonic() - self._began

    def _commit(self) -> None:
        try:
            self.store.commit()
        except HpclmError:
            self.step = self._before
            raise
        seconds = self.store.team.highest(time.monotonic() - self._began)  # all decide alike what there is time for
        self._longest = max(self._longest, seconds)
        log.info("saved step %d in %.2f s; training waited %.2f s", self.step, seconds, min(self._stalled, seconds))

    def _finish_flight(self) -> None:
        try:
            self._commit()
        except LockedError:
            raise
        except HpclmError as error:
            log.error("%s; training goes on, the checkpoints before it are untouched", error)
