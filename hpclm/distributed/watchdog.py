"""The watchdog thread of each rank: it ends the rank when the run has failed, or makes no progress.

The main thread reports its phase (``enter``), and every collective counts as progress (``tick``). The thread sends that
to the store, and on rank 0 it judges all ranks by it. A run hangs if every rank has been in its phase
for longer than the phase may take: as long as one of them may be working, the others may wait. A rank without
heartbeats is a hang by itself after twice that time, and lost at once if its host does not respond either.

Clocks of different hosts are never compared, and time in which this process itself did not run does not count: a job
that is suspended as a whole and continues an hour later does not hang.
"""

import faulthandler
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpclm import scheduler
from hpclm.config import ClusterConfig
from hpclm.distributed import bootstrap, failure, hang, network
from hpclm.distributed.failure import Failure
from hpclm.distributed.hang import RankState
from hpclm.distributed.heartbeat import Heartbeat
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.shutdown import Shutdown
from hpclm.distributed.stragglers import Stragglers, Tally, WorkTimer
from hpclm.errors import REQUEUE
from hpclm.node import processes

log = logging.getLogger(__name__)

TURN = 0.25  # seconds between checks for a failure
JUDGE = 0.5  # between checks of the other ranks
PAUSED = 1.0  # more than that between two checks means that this process did not run
RECENT = 30.0  # seconds for which such a pause is remembered
SILENCE = 15.0  # seconds without a heartbeat after which the host is probed
PATIENT = 6.0  # times the limit, for phases that sometimes take long
LEAST = 120.0  # and at least this many seconds
UNLIMITED = ("", "data")  # before the first phase; reading and building datasets
STEP, FIRST = "step", "first step"
ANSWER, WAKE = 2.0, 5.0  # seconds that ranks have to report their position, and after some had to be woken
REPORT = 10.0  # seconds within which the hang report must be written
REPORTED = "hpclm/reported"


class Watchdog:
    """Tracks where this rank is, and whether the run makes progress."""

    def __init__(
        self, settings: ClusterConfig, ranks: Sequence[RankInfo], me: RankInfo, shutdown: Shutdown, lost_code: int = 1
    ):
        """``lost_code``: exit code when another rank is lost."""
        self.settings, self.ranks, self.me = settings, ranks, me
        self.shutdown, self.lost_code = shutdown, lost_code
        self.heartbeat: Heartbeat | None = None
        self.limit = settings.hang_minutes * 60
        self.phase, self.step, self.leaving = "", 0, False
        self.waits_in = ""
        """The operation of all ranks that the main thread waits in (``context.waits_in``); empty if in none."""
        self.out: Path | None = None
        self.folder: Path | None = None
        """For the stacks."""
        self._written = False
        """Whether this rank has written its stacks, because the run hangs."""
        self.now = self._moved = 0.0
        """Seconds in which this process ran; and when the main thread last made progress."""
        self._entered = self._longest = 0.0
        self._last, self._pause = time.monotonic(), (-math.inf, 0.0)
        self._timer = WorkTimer()
        self._stragglers: Stragglers | None = None
        self._heard: dict[int, tuple[Any, float]] = {}
        """Of each rank the last heartbeat, and when it came."""
        self._probed: dict[int, float] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._exchange: threading.Thread | None = None
        self._launcher: int | None = None

    def start(self, heartbeat: Heartbeat | None = None, launched: bool = False) -> None:
        """Start to watch; ``launched``: in a process without peers, also whether its parent is alive."""
        self.heartbeat = heartbeat
        self._launcher = os.getppid() if launched else None
        if heartbeat is None and not self.limit and not launched:
            return
        with suppress(RuntimeError, ValueError, OSError):  # without a standard error
            faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)  # kill -QUIT shows where a process is
        self._thread = threading.Thread(target=self._run, name=f"{hang.HELPERS}watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and leave SIGQUIT as it was: this process may be a notebook's."""
        self._over.set()
        faulthandler.unregister(signal.SIGQUIT)
        for thread in (self._thread, self._exchange):
            if thread is not None and thread is not threading.current_thread():
                thread.join(4 * TURN)

    @property
    def watches(self) -> bool:
        """Whether the thread can still end this process because of a failure elsewhere."""
        return self._thread is not None and self._thread.is_alive() and not self.leaving

    def enter(self, phase: str, step: int | None = None) -> None:
        """The main thread begins ``phase``, of or after ``step``; no other thread calls this."""
        if self.phase in (STEP, FIRST):
            self._timer.end()
            self._longest = max(self._longest, self.now - self._entered)
        if phase == STEP:
            self._timer.begin()
        self._entered = self.now
        self.phase = FIRST if phase == STEP and not self._timer.tally.steps else phase
        self.step = self.step if step is None else step
        self.tick()

    def tick(self) -> None:
        """The main thread makes progress within its phase."""
        self._moved = self.now

    def reading(self) -> AbstractContextManager[None]:
        """During the block the main thread reads data, or waits for them."""
        return self._timer.reading()

    def write_to(self, out: Path, name: str, stages: int = 1) -> None:
        """Set the run directory: stacks go to its folder logs/NAME, the same on every rank."""
        self.out, self.folder = out, out / "logs" / name
        if self.me.rank == 0:
            self._stragglers = Stragglers(self.ranks, out / "ranks.json", stages)

    def progress(self) -> dict[str, Any]:
        """What this rank sends the others in its heartbeats."""
        location, waits_in = hang.position(self.waits_in)
        paused = self._pause[1] if time.monotonic() - self._pause[0] < RECENT else 0.0
        where = {"phase": self.phase, "step": self.step, "location": location, "waits_in": waits_in}
        state = {"idle": self.now - self._moved, "paused": paused, "stacks": self._written}
        return {**where, **state, **asdict(self._timer.tally)}

    # the following runs in the watchdog thread

    def _run(self) -> None:
        self._last, main, judged = time.monotonic(), threading.main_thread(), 0.0
        while main.is_alive() and not self._over.wait(TURN):
            self._advance()
            try:
                self._look_for_failure()
                if self.now - judged >= JUDGE:
                    judged = self.now
                    self._judge()
            except Exception:  # a fault of the watchdog must not end a run that trains
                log.debug("the watchdog failed", exc_info=True)

    def _advance(self) -> None:
        """Advance ``now``, and note if this process did not run since the last call."""
        moment = time.monotonic()
        passed, self._last = moment - self._last, moment
        self.now += min(passed, PAUSED)
        if passed > PAUSED:
            self._pause = (moment, passed)

    def _within(self, seconds: float, act: Callable[[], object]) -> bool:
        """Whether ``act()``, a question to the store, ends in time. It has its own thread, and one at a time: PyTorch's client
        waits forever for a store whose process is stopped."""
        if self._exchange is not None:
            self._exchange.join(seconds)
            if self._exchange.is_alive():
                return False
        self._exchange = threading.Thread(target=act, name=f"{hang.HELPERS}store", daemon=True)
        self._exchange.start()
        self._exchange.join(seconds)
        return not self._exchange.is_alive()

    def _look_for_failure(self) -> None:
        heart = self.heartbeat
        if self._launcher is not None and os.getppid() != self._launcher:
            self._exit(Failure(self.me.rank, "launcher", 1))
        if heart is None or self.leaving:
            return
        self._within(TURN, heart.exchange)
        if self.leaving:  # meanwhile, and rank 0 may have closed the store
            return
        if heart.failure:
            self._exit(heart.failure)
        elif heart.lost:
            self._exit(Failure(0, "killed", self.lost_code), store_answers=False)

    def _exit(self, cause: Failure, store_answers: bool = True) -> None:
        """Exit because of ``cause``."""
        if not self.shutdown.claim():
            return
        reachable = self.heartbeat.store if store_answers and self.heartbeat else None
        if cause.kind == "hung" and self.heartbeat:
            self._join_report(cause, self.heartbeat)
        if cause.rank == 0 and cause.kind in ("killed", "lost"):
            reachable = None  # it will not log the failure
        self.shutdown.exit(cause.describe(self.ranks), cause.code, reachable)

    def _judge(self) -> None:
        beats = {**(self.heartbeat.received if self.heartbeat else {}), self.me.rank: self.progress()}
        if self._stragglers is not None and len(beats) == len(self.ranks):
            self._stragglers.update({r: Tally(b["steps"], b["work"], b["total"]) for r, b in beats.items()}, self.step)
        if not self.limit or self.leaving:
            return
        states = {rank: self._state(rank, beat) for rank, beat in beats.items()}
        for rank, state in states.items():
            if state.silent > SILENCE and rank != self.me.rank and self._unreachable(rank):
                self._fail(rank, state.silent)
        if self.me.rank and states.get(0, RankState("", 0, 0)).silent <= self.limit:
            return  # rank 0 handles it
        late = {rank for rank, state in states.items() if state.idle > self._allowance(state.phase)}
        gone = {rank for rank, state in states.items() if self._silent_too_long(state)}
        if (len(late) < len(states) and not gone) or (self.heartbeat is None and hang.debugged()):
            return
        if self.shutdown.claim():
            self._report(states)

    def _state(self, rank: int, beat: dict[str, Any]) -> RankState:
        """What is known of ``rank`` from its last heartbeat."""
        before, moment = self._heard.get(rank, (None, self.now))
        if beat != before or rank == self.me.rank:
            moment = self.now
        self._heard[rank] = beat, moment
        silent = 0.0 if self.now - moment < 2 * PAUSED else self.now - moment
        stopped = beat["paused"] > self.limit / 2 or (
            silent > 0 and self._local(rank) and processes.stopped(self.ranks[rank].pid)
        )
        where = (beat["location"], beat["waits_in"])
        return RankState(beat["phase"], beat["step"], beat["idle"] + self.now - moment, *where, silent, stopped)

    def _unreachable(self, rank: int) -> bool:
        """Whether the host of a silent rank does not respond; probed at most every SILENCE seconds."""
        info = self.ranks[rank]
        if info.host == self.me.host or not info.address or self.now - self._probed.get(rank, -math.inf) < SILENCE:
            return False
        self._probed[rank] = self.now
        return not network.reachable(info.address, seconds=5.0)

    def _fail(self, rank: int, silent: float) -> None:
        """End the run, since the host of ``rank`` does not respond."""
        text = f"{self.ranks[rank]} was lost: no heartbeat for {silent:.0f} s, and its host does not answer"
        trouble = scheduler.named("slurm").troubles([self.ranks[rank].host], seconds=2.0) if bootstrap.job() else []
        cause = Failure(rank, "lost", self.lost_code, ". Slurm says that ".join([text, *trouble]))
        first = self._publish(cause)
        self._exit(first or cause, first is not None)

    def _silent_too_long(self, state: RankState) -> bool:
        """Whether a rank has been silent for so long that its phase no longer matters."""
        # once this rank has completed a step, all have begun one, whatever a silent rank sent last
        unlimited = state.phase in UNLIMITED and not self._timer.tally.steps
        return state.silent > self.limit * (1 if state.stopped else math.inf if unlimited else 2)

    def _allowance(self, phase: str) -> float:
        """Seconds that a rank may be in a phase."""
        if phase in UNLIMITED:
            return math.inf
        return max(self.limit, 2 * self._longest) if phase == STEP else max(PATIENT * self.limit, LEAST)

    # the end of a run that hangs

    def _publish(self, cause: Failure) -> Failure | None:
        """Publish ``cause``; the first failure, or None if the store does not answer."""
        heart, first = self.heartbeat, list[Failure]()
        if heart is None or heart.lost or time.monotonic() - heart.answered > ANSWER:
            return None
        answered = self._within(ANSWER, lambda: first.append(failure.publish(heart.store, cause, len(self.ranks))))
        return first[0] if answered and first else None

    def _stacks(self) -> None:
        """Write this process's stacks, and wake stopped ranks of this machine, so that they can do so too, and exit."""
        with suppress(OSError):  # a disk may be why it hangs
            if self.folder:
                head = f"{self.me}, {self.phase} {self.step}: {hang.position(self.waits_in)[0]}"
                hang.write_stacks(self.folder / f"rank-{self.me.rank:05d}.txt", head)
        self._written = True
        processes.wake(info.pid for info in self.ranks if self._local(info.rank))

    def _local(self, rank: int) -> bool:
        """Whether another rank is on this machine."""
        return rank != self.me.rank and self.ranks[rank].machine == self.me.machine

    def _join_report(self, cause: Failure, heart: Heartbeat) -> None:
        """Say where this rank is, and wait for the hang report of another rank."""
        self._advance()  # it may have been stopped while it asked
        self._stacks()
        with suppress(RuntimeError):
            heart.send()
            heart.store.wait(REPORTED, REPORT, pause=0.1)
        self.shutdown.exit("", cause.code)

    def _report(self, states: dict[int, RankState]) -> None:
        """Collect the positions of all ranks, write the hang report, and end the run."""
        heart, cause = self.heartbeat, Failure(self.me.rank, "hung", REQUEUE)
        self._stacks()
        first = self._publish(cause)
        if first is None and heart and self._within(WAKE, heart.exchange):  # rank 0 was stopped, and is awake now
            first = self._publish(cause)
        if first and heart:
            if first.kind != "hung":
                self.shutdown.exit(first.describe(self.ranks), first.code, heart.store)
            if first.rank != self.me.rank:
                self._join_report(first, heart)
            silent = any(state.silent for state in states.values())
            processes.wait_until(lambda: self._all_answered(heart), WAKE if silent else ANSWER, pause=0.1)
            for rank, beat in heart.received.items():
                state = self._state(rank, beat)
                states[rank] = replace(state, idle=max(state.idle, states[rank].idle if rank in states else 0.0))
        ending = "the run ends with exit code 85: the job, or the same command, resumes from its last checkpoint"
        text = hang.report(states, self.ranks, self.folder, ending)
        with suppress(OSError):
            if self.out:
                hang.write(self.out / "hang.json", text, states, self.ranks)
        with suppress(OSError):  # rank 0 may not be able to
            if self.me.rank and self.shutdown.log:
                self.shutdown.log_failure(text)
            else:
                log.error(text)
        if first and heart:
            heart.store.set(REPORTED, True)
        self._kill([rank for rank, state in states.items() if state.silent and self._local(rank)])
        self.shutdown.exit("", REQUEUE, heart.store if first and heart else None)

    def _all_answered(self, heart: Heartbeat) -> bool:
        """Whether all ranks have written their stacks."""
        heart.send()
        heart.receive(len(self.ranks))
        return sum(beat["stacks"] for beat in heart.received.values()) == len(self.ranks)

    def _kill(self, silent: Collection[int]) -> None:
        """Let ranks of this machine that do not respond print their stacks, and kill them, since they would never exit."""
        for number in (signal.SIGQUIT, signal.SIGKILL) if silent else ():
            for rank in silent:
                processes.send_signal(self.ranks[rank].pid, number)
            time.sleep(1.0 if number == signal.SIGQUIT else 0.0)
