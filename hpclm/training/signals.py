"""A signal that comes during a long step: the log says what follows, and a step that outlasts the time left ends with its process.

Both are done by the watchdog's thread: the main thread is in the step, perhaps inside a library that runs no Python.
"""

import logging
import shlex
import signal
from pathlib import Path

from hpclm.config import RunConfig
from hpclm.distributed.watchdog import Watchdog
from hpclm.node.preemption import WARNINGS, Preemption
from hpclm.training.control import Saver

log = logging.getLogger(__name__)
LONG = 2.0  # seconds that a step goes on after a signal until the log says what follows
LATE = 5.0  # seconds beyond the time that a signal leaves until the step is given up


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
