"""The watchdog thread of each rank: it ends the rank when it makes no progress.

The main thread reports its phase (``enter``), and every collective counts as progress (``tick``). A rank is late if it has made no
progress for longer than its phase may take.

Time in which this process itself did not run does not count: a job that is suspended as a whole and continues an hour later does not
hang. If one rank alone is stopped, the others are late.
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
from hpclm.distributed.ending import Ending
from hpclm.distributed.hang import RankState
from hpclm.distributed.stragglers import WorkTimer
from hpclm.node import ends

log = logging.getLogger(__name__)

TURN = 0.25  # seconds between two looks
PAUSED = 1.0  # more than that between two looks means that this process did not run
IDLE = 1.0  # seconds without progress after which this rank looks whether others have failed; then after 2, 4, 8, ...
REARM = 1.0  # seconds between two settings of faulthandler's timer
MARGIN = 10.0  # seconds by which that comes later than this thread itself would act
STEP, FIRST = "step", "first step"
FOREVER = 1e6  # seconds
UNLIMITED = ("", "data")  # phases that may take any time: before the first one; building datasets
PATIENCE_FACTOR = 6.0  # times the limit, for other phases than steps
MIN_PATIENCE_SECONDS = 120.0  # for these phases, however short the limit is


class Watchdog:
    """Tracks where this rank is, and whether it makes progress."""

    def __init__(self, settings: ClusterConfig, ending: Ending):
        self.ending = ending
        self.limit = settings.hang_minutes * 60
        self.phase, self.step, self.leaving = "", 0, False
        self.waits_in = ""
        """The operation of all ranks that the main thread waits in (``context.waits_in``); empty if in none."""
        self.each_turn: Callable[[], None] = lambda: None
        """Called by the watchdog's thread, a few times a second."""
        self.timer = WorkTimer()
        self.now = self._moved = 0.0
        """Seconds in which this process ran; and when the main thread last made progress."""
        self._entered = self._longest = self._armed = 0.0
        self._asks_at = IDLE
        self._last = time.monotonic()
        self._stacks: IO[str] | None = None
        self._over = threading.Event()
        self._received: tuple[int, int] | None = None
        """A pipe into which Python writes the numbers of signals at once, whatever the main thread is in."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to watch."""
        with suppress(RuntimeError, ValueError, OSError):  # without a standard error
            faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)  # kill -QUIT shows where a process is
        if len(self.ending.ranks) > 1:
            self._received = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            with suppress(ValueError):  # not in the main thread
                signal.set_wakeup_fd(self._received[1], warn_on_full_buffer=False)
        # a thread, not a signal: the main thread may be in a collective, where Python runs no handlers
        self._thread = threading.Thread(target=self._run, name="hpclm-watchdog", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """This rank exits normally: nothing ends it any more."""
        self.leaving = True
        self._disarm()

    def _disarm(self) -> None:
        if self._stacks:
            faulthandler.cancel_dump_traceback_later()
            self._stacks.close()
            Path(self._stacks.name).unlink(missing_ok=True)
            self._stacks = None

    def stop(self) -> None:
        """Stop watching, and leave SIGQUIT as it was: this process may be a notebook's."""
        self.leave()
        self._over.set()
        faulthandler.unregister(signal.SIGQUIT)
        if self._thread is not None:
            self._thread.join(4 * TURN)
        if self._received:
            with suppress(ValueError):
                signal.set_wakeup_fd(-1)

    @property
    def in_step(self) -> bool:
        """Whether the main thread is in a step."""
        return self.phase in (STEP, FIRST)

    def enter(self, phase: str, step: int | None = None) -> None:
        """The main thread begins ``phase``, of or after ``step``; no other thread calls this."""
        if self.phase in (STEP, FIRST):
            self.timer.end()
            self._longest = max(self._longest, self.now - self._entered)
        if phase == STEP:
            self.timer.begin()
        self._entered = self.now
        # the first step compiles, so it has the patience of a phase, not of a step
        self.phase = FIRST if phase == STEP and not self.timer.steps else phase
        self.step = self.step if step is None else step
        self.tick()

    def tick(self) -> None:
        """The main thread makes progress within its phase."""
        self._moved = self.now

    def reading(self) -> AbstractContextManager[None]:
        """During the block the main thread reads data, or waits for them."""
        return self.timer.reading()

    def write_to(self, folder: Path) -> None:
        """Stacks go to ``folder``. Where Python itself is blocked, inside a library that never returns, faulthandler writes them."""
        if self.limit and len(self.ending.ranks) > 1:
            ends.make_folder(folder)
            self._stacks = (folder / f"rank-{self.ending.me.rank}-blocked.txt").open("w", encoding="utf-8")

    @property
    def patience(self) -> float:
        """Seconds without progress that the present phase may take."""
        if self.phase == STEP:
            # a run whose regular steps take longer than the limit must not be taken for one that hangs
            return max(self.limit, 2 * self._longest)
        return FOREVER if self.phase in UNLIMITED else max(PATIENCE_FACTOR * self.limit, MIN_PATIENCE_SECONDS)

    def state(self) -> RankState:
        """What this rank is doing."""
        location, waits_in = hang.position(self.waits_in)
        return RankState(self.phase, self.step, self.now - self._moved, location, waits_in)

    # the following runs in the watchdog thread

    def _run(self) -> None:
        main = threading.main_thread()
        while main.is_alive() and not self._over.is_set():
            pipes = self._received[:1] if self._received else ()
            heard, _, _ = select.select(pipes, [], [], TURN)
            if heard and signal.SIGTERM in os.read(heard[0], 64):
                self.ending.told()
            moment = time.monotonic()
            # a clock of this process: an hour in which it was suspended counts as a second
            self.now, self._last = self.now + min(moment - self._last, PAUSED), moment
            try:
                if not self.leaving:
                    self.each_turn()
                    self._look()
            except Exception:  # a fault of the watchdog must not end a run that trains
                log.debug("the watchdog failed", exc_info=True)

    def _look(self) -> None:
        idle = self.now - self._moved
        if idle >= self._asks_at:
            self._asks_at *= 2
            self.ending.answer()
        elif idle < IDLE:
            self._asks_at = IDLE
        if not self.limit:
            return
        left = self.patience - idle
        if left < 0:
            self._disarm()
            self.ending.hang(self.state())
        elif self._stacks and self.now - self._armed >= REARM:
            self._armed = self.now
            faulthandler.dump_traceback_later(left + MARGIN, file=self._stacks)
