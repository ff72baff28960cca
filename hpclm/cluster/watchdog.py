"""A watchdog beside the main thread of each rank: says how far it is, and finds what no longer moves.

The main thread says where it is (``at``), and each agreement with the others counts as a sign of life (``beat``). A thread
tells it to rank 0, and rank 0's how far that one is to the others. A run is hung when every rank has been in its place for
longer than that place may take: while one of them may still be at work, the others may wait. A rank that cannot even say
where it is, because it was stopped or its node is down, is silent: that alone is a hang when it lasts twice as long.

Clocks of different ranks are never compared, and time in which this process itself did not run does not count: a job that
is suspended as a whole and goes on an hour later is not hung.
"""

import faulthandler
import logging
import math
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm.cluster import process, stacks
from hpclm.cluster.ending import HostLine
from hpclm.cluster.hang import Sight
from hpclm.cluster.hung import Hung
from hpclm.cluster.line import Line
from hpclm.cluster.own import Own
from hpclm.cluster.pace import Pace
from hpclm.cluster.rollcall import Present
from hpclm.config import ClusterConfig

log = logging.getLogger(__name__)

LOOK = 0.05  # seconds between looks at the main thread
JUDGE = 0.5  # seconds between looks at the others
LONGEST_LOOK = 1.0  # seconds that one look counts for at most: longer, and this process did not run
RECENT = 30.0  # seconds in which a pause of this process is remembered
SELDOM = 10.0  # seconds between two words to the others at most
OFTEN = 2  # steps after which there is a word sooner
PATIENT = 6.0  # times the limit that places have which take long now and then
LEAST = 120.0  # seconds that these have in any case
UNLIMITED = ("", "data")  # before anything is watched; reading and building datasets takes as long as it takes
STEP, FIRST = "step", "first step"


class Watch:
    """Where this rank is, and whether the run moves."""

    def __init__(self, settings: ClusterConfig, me: Present, line: Line | None = None, job: str = ""):
        """``job``: Slurm's number of the job that this rank is a task of."""
        self.settings, self.me, self.line = settings, me, line
        self.everyone: Sequence[Present] = line.everyone if line else (me,)
        self.limit = settings.hang_minutes * 60
        self.phase, self.step, self.beats, self.steps = "", 0, 0, 0
        self.now = 0.0
        """Seconds in which this process ran, as far as its looks go."""
        self._entered = self._longest = 0.0
        self._last, self._pause = time.monotonic(), (-math.inf, 0.0)
        self._hung = Hung(settings, me, line, job, lambda: f"{self.phase} {self.step}", self._paused, self._sights)
        self._own = Own()
        self._pace = Pace(settings.slow)
        self._seen: dict[int, tuple[Any, float, int, float]] = {}
        self._said = (-math.inf, 0)
        self._over = threading.Event()

    def __enter__(self) -> "Watch":
        """Begin to watch, unless the settings say not to."""
        if self.limit or (self.settings.slow and self.line):
            with suppress(RuntimeError, ValueError, OSError):  # without a standard error
                faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)  # kill -QUIT tells where a process is
            threading.Thread(target=self._run, name=f"{stacks.OWN}watch", daemon=True).start()
        return self

    def at(self, phase: str, step: int | None = None) -> None:
        """The main thread begins ``phase``, of or after ``step``; called by nobody else."""
        if self.phase in (STEP, FIRST):
            self._longest = max(self._longest, self.now - self._entered)
            self.steps += 1
        self._entered = self.now
        self.phase = FIRST if phase == STEP and not self.steps else phase
        self.step = self.step if step is None else step
        self.beats += 1

    def beat(self) -> None:
        """The main thread gets on within its phase."""
        self.beats += 1

    def write_to(self, out: Path, name: str, stages: int = 1) -> None:
        """From here on there is a run directory: stacks go to its folder of that name, the same on every rank."""
        self._hung.out, self._hung.folder = out, out / "logs" / name
        self._pace.begin(out / "ranks.json" if self.me.rank == 0 else None, stages)

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        self._over.set()

    # what follows runs in the watching thread

    def _run(self) -> None:
        self._last = judged = time.monotonic()
        main = threading.main_thread()
        while main.is_alive() and not self._over.wait(LOOK):
            moment = time.monotonic()
            passed, self._last = moment - self._last, moment
            self.now += min(passed, LONGEST_LOOK)
            if passed > LONGEST_LOOK:
                self._pause = (moment, passed)
            try:
                self._own.look(min(passed, LONGEST_LOOK), LOOK, self.phase in (STEP, FIRST))
                self._say()
                if moment - judged > JUDGE:
                    judged = moment
                    self._judge()
            except Exception:  # a fault of the watchdog's must not end a run that trains
                log.debug("the watchdog failed", exc_info=True)

    def _say(self) -> None:
        """A word to the others, now and then."""
        when, steps = self._said
        seldom = min(SELDOM, self.limit / 10) if self.limit else SELDOM
        waited = self.now - when
        if self.line and (waited >= seldom or (waited >= JUDGE and self.steps - steps >= OFTEN)):
            self._said = (self.now, self.steps)
            self.line.beat(**self._word())

    def _word(self) -> dict[str, Any]:
        return {"phase": self.phase, "step": self.step, "beats": self.beats, **self._own.word(self.steps)}

    def _sights(self) -> dict[int, Sight]:
        """What is known of the ranks that this one hears of: of all on rank 0, else of itself and rank 0."""
        words = {**(self.line.heard if self.line else {}), self.me.rank: self._word()}
        return {rank: self._sight(rank, words.get(rank)) for rank in self._visible()}

    def _judge(self) -> None:
        sights = self._sights()
        if isinstance(self.line, HostLine) and len(self.line.heard) == len(self.everyone) - 1:
            self._pace.compare({**self.line.heard, self.me.rank: self._word()}, self.everyone, self.step)
        if not self.limit or (self.me.rank and sights[0].silent <= self.limit):  # rank 0 sees to it
            return
        late = {rank for rank, sight in sights.items() if sight.seconds > self._allowance(sight.phase)}
        gone = {rank for rank, sight in sights.items() if self._gone(sight)}
        if (len(late) < len(sights) and not gone) or self._debugged():
            return
        if self.line is None or self.line.ends():
            self._hung.finish(sights)

    def _visible(self) -> Sequence[int]:
        """Ranks that this one hears of: all on rank 0, else itself and rank 0."""
        return range(len(self.everyone)) if self.me.rank == 0 else (0, self.me.rank)

    def _sight(self, rank: int, word: dict[str, Any] | None) -> Sight:
        """What is known of ``rank``, by its last word."""
        beats = word["beats"] if word else 0
        before, heard, count, moved = self._seen.get(rank, (None, self.now, 0, self.now))
        if word is not before:
            before, heard = word, self.now
        if beats != count:
            count, moved = beats, self.now
        self._seen[rank] = (before, heard, count, moved)
        phase, step = (word["phase"], word["step"]) if word else ("", 0)
        own = self.everyone[rank].host == self.me.host and self.now - heard > JUDGE
        return Sight(phase, step, self.now - moved, self.now - heard, own and process.stopped(self.everyone[rank].pid))

    def _gone(self, sight: Sight) -> bool:
        """Whether a rank has been silent for so long that its place does not matter."""
        unlimited = sight.phase in UNLIMITED
        return sight.silent > self.limit * (1 if sight.stopped else math.inf if unlimited else 2)

    def _allowance(self, phase: str) -> float:
        """Seconds that a rank may be in a place."""
        if phase in UNLIMITED:
            return math.inf
        return max(self.limit, 2 * self._longest) if phase == STEP else max(PATIENT * self.limit, LEAST)

    def _debugged(self) -> bool:
        return self.line is None and stacks.stand().debugged

    def _paused(self) -> float:
        """Seconds for which this process did not run of late."""
        moment, (when, seconds) = time.monotonic(), self._pause
        return max(moment - self._last, seconds if moment - when < RECENT else 0.0)
