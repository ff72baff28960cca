"""The watchdog thread of each rank, which ends a rank that makes no progress.

The main thread reports its phase (``enter``), and every collective counts as progress (``tick``). A rank hangs if it has made no progress
for longer than its phase may take.

Time in which this process did not run does not count: a job that is suspended as a whole and continues an hour later does not hang. If
only one rank is stopped, the others hang.
"""

import faulthandler
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO

from hpclm.config import ClusterConfig
from hpclm.distributed import hang
from hpclm.distributed.ending import RankEnding
from hpclm.distributed.hang import RankState
from hpclm.distributed.stragglers import WorkTimer
from hpclm.node import ends

log = logging.getLogger(__name__)

TURN = 0.25  # seconds between two turns of the thread
PAUSED = 1.0  # a longer time between two turns counts as this, since the process was suspended
IDLE = 1.0  # seconds without progress until this rank checks whether others have failed; then 2, 4, 8, ...
REARM = 1.0  # seconds between two settings of faulthandler's timer
MARGIN = 10.0  # seconds between this thread's limit and faulthandler's, which is later
STEP = "step"
FIRST = "first step"
FOREVER = 1e6  # seconds
UNLIMITED = ("", "data")  # phases that may take any time: before the first one, and building datasets
PATIENCE_FACTOR = 6.0  # times the limit, for phases other than steps
MIN_PATIENCE_SECONDS = 120.0  # for phases other than steps, however short the limit is


class Watchdog:
    """Tracks the phase of this rank, and whether it makes progress."""

    def __init__(self, settings: ClusterConfig, ending: RankEnding):
        self.ending = ending
        self.limit = settings.hang_minutes * 60  # seconds; 0: nothing counts as a hang
        self.phase = ""
        self.step = 0
        self.leaving = False
        self.waits_in = ""  # the collective that the main thread waits in (``context.waits_in``); empty in none
        self.each_turn: Callable[[], None] = lambda: None  # called by the watchdog's thread, a few times a second
        self.timer = WorkTimer()
        self.now = 0.0  # seconds that this process has run: the clock of the times below
        self._moved = 0.0  # when the main thread last made progress
        self._entered = 0.0  # when it entered the present phase
        self._armed = 0.0  # when faulthandler's timer was set
        self._longest = 0.0  # seconds of the longest step
        self._checks_at = IDLE  # seconds without progress until the next check for failures of other ranks
        self._last = time.monotonic()  # time of the last turn
        self._stacks: IO[str] | None = None
        self._over = threading.Event()
        self._signals: tuple[int, int] | None = None
        """A pipe into which Python writes the numbers of signals at once, whatever the main thread does."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the watchdog thread."""
        with suppress(RuntimeError, ValueError, OSError):  # the process may have no standard error
            faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)  # kill -QUIT prints all stacks
        if len(self.ending.ranks) > 1:
            self._signals = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            with suppress(ValueError):  # not in the main thread
                signal.set_wakeup_fd(self._signals[1], warn_on_full_buffer=False)
        # not a signal handler: the main thread may be in a collective, where Python runs none
        self._thread = threading.Thread(target=self._run, name="hpclm-watchdog", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Stop acting on hangs: this rank exits normally."""
        self.leaving = True
        self._disarm()

    def _disarm(self) -> None:
        if self._stacks:
            faulthandler.cancel_dump_traceback_later()
            self._stacks.close()
            Path(self._stacks.name).unlink(missing_ok=True)
            self._stacks = None

    def stop(self) -> None:
        """Stop the thread, and restore SIGQUIT: this process may be a notebook's."""
        self.leave()
        self._over.set()
        faulthandler.unregister(signal.SIGQUIT)
        if self._thread is not None:
            self._thread.join(4 * TURN)
        if self._signals:
            with suppress(ValueError):
                signal.set_wakeup_fd(-1)

    @property
    def in_step(self) -> bool:
        """Whether the main thread is in a step."""
        return self.phase in (STEP, FIRST)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Note that the main thread, the caller, begins ``phase``. ``step``: the step of the phase, or the last step before the phase."""
        if self.phase in (STEP, FIRST):
            self.timer.end()
            self._longest = max(self._longest, self.now - self._entered)
        if phase == STEP:
            self.timer.begin()
        self._entered = self.now
        self.phase = phase
        if phase == STEP and not self.timer.steps:
            self.phase = FIRST  # it compiles, so it may take longer
        if step is not None:
            self.step = step
        self.tick()

    def tick(self) -> None:
        """Note that the main thread makes progress within its phase."""
        self._moved = self.now

    def reading(self) -> AbstractContextManager[None]:
        """Count the block as reading data, or waiting for them."""
        return self.timer.reading()

    def write_to(self, folder: Path) -> None:
        """Write stacks to ``folder``. If Python itself is blocked, in a library that never returns, faulthandler writes them."""
        if self.limit and len(self.ending.ranks) > 1:
            ends.make_folder(folder)
            self._stacks = (folder / f"rank-{self.ending.me.rank}-blocked.txt").open("w", encoding="utf-8")

    @property
    def patience(self) -> float:
        """Seconds without progress that the present phase may take."""
        if self.phase == STEP:
            return max(self.limit, 2 * self._longest)  # regular steps may take longer than the limit
        if self.phase in UNLIMITED:
            return FOREVER
        return max(PATIENCE_FACTOR * self.limit, MIN_PATIENCE_SECONDS)

    def state(self) -> RankState:
        """The position of this rank."""
        location, waits_in = hang.position(self.waits_in)
        return RankState(self.phase, self.step, self.now - self._moved, location, waits_in)

    # the following runs in the watchdog thread

    def _run(self) -> None:
        main = threading.main_thread()
        while main.is_alive() and not self._over.is_set():
            pipes = self._signals[:1] if self._signals else ()
            readable, _, _ = select.select(pipes, [], [], TURN)
            if readable and signal.SIGTERM in os.read(readable[0], 64):
                self.ending.told_to_end()
            moment = time.monotonic()
            # an hour in which the process was suspended counts as a second
            self.now += min(moment - self._last, PAUSED)
            self._last = moment
            try:
                if not self.leaving:
                    self.each_turn()
                    self._check()
            except Exception:  # a fault of the watchdog must not end training
                log.debug("the watchdog failed", exc_info=True)

    def _check(self) -> None:
        idle = self.now - self._moved
        if idle >= self._checks_at:
            self._checks_at *= 2
            self.ending.answer()
        elif idle < IDLE:
            self._checks_at = IDLE
        if not self.limit:
            return
        left = self.patience - idle
        if left < 0:
            self._disarm()
            self.ending.hang(self.state())
        elif self._stacks and self.now - self._armed >= REARM:
            self._armed = self.now
            faulthandler.dump_traceback_later(left + MARGIN, file=self._stacks)
