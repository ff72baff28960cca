"""The watchdog thread of each rank: it ends the rank when the run has failed, or makes no progress.

The main thread reports its phase (``enter``), and every collective counts as progress (``tick``). The thread sends that
to the store, and rank 0, or the others if rank 0 is silent, judges all ranks by it. A rank is late if it has made no progress for
longer than its phase may take. A run hangs if all ranks are late: as long as one may be working, the others may wait. It also
hangs if a rank sends no heartbeat for twice ``cluster.hang_minutes``; if its host does not respond either, the rank is lost.

Clocks of different hosts are never compared, and time in which this process itself did not run does not count: a job
that is suspended as a whole and continues an hour later does not hang.
"""

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpclm.config import ClusterConfig
from hpclm.distributed import failure, hang, network
from hpclm.distributed.failure import Failure
from hpclm.distributed.hang import RankState
from hpclm.distributed.heartbeat import Heartbeat
from hpclm.distributed.rendezvous import RankInfo, rank_key
from hpclm.distributed.shutdown import Shutdown, exit_after
from hpclm.distributed.store import JsonStore
from hpclm.distributed.stragglers import Record, Stragglers, WorkTimer
from hpclm.errors import ExitCode
from hpclm.node import ends, parent, processes
from hpclm.node.job import Job

log = logging.getLogger(__name__)

TURN = 0.25  # seconds between checks for a failure
JUDGE = 0.5  # between checks of the other ranks
PAUSED = 1.0  # more than that between two checks means that this process did not run
SETTLE = 0.5  # until the end of the launcher is visible after that of its store
SILENCE = 15.0  # seconds without a heartbeat after which the host is probed
STEP, FIRST = "step", "first step"
FOREVER = 1e6  # seconds
UNLIMITED = ("", "data")  # phases that may take any time: before the first one; building datasets
PATIENCE_FACTOR = 6.0  # times the limit, for other phases than steps
MIN_PATIENCE_SECONDS = 120.0  # for these phases, however short the limit is
WAKE = 5.0  # seconds that ranks have to learn that the run hangs, after some had to be woken


class Watchdog:
    """Tracks where this rank is, and whether the run makes progress."""

    def __init__(
        self,
        settings: ClusterConfig,
        ranks: Sequence[RankInfo],
        me: RankInfo,
        shutdown: Shutdown,
        lost_code: int = 1,
        job: Job | None = None,
    ):
        """``lost_code``: exit code when another rank is lost; ``job``: that this rank is part of."""
        self.job = job or Job()
        self.ranks, self.me, self.shutdown, self.lost_code = ranks, me, shutdown, lost_code
        self.neighbours = me.neighbours(ranks)
        self.heartbeat: Heartbeat | None = None
        self.limit = settings.hang_minutes * 60
        self.phase, self.step, self.leaving = "", 0, False
        self.waits_in = ""
        """The operation of all ranks that the main thread waits in (``context.waits_in``); empty if in none."""
        self.each_turn: Callable[[], None] = lambda: None
        """Called by the watchdog's thread, a few times a second."""
        self._record: Record | None = None
        self.folder: Path | None = None
        """For the stacks."""
        self.timer = WorkTimer()
        self.now = self._moved = 0.0
        """Seconds in which this process ran; and when the main thread last made progress."""
        self._entered = self._longest = 0.0
        self._last = time.monotonic()
        self._heard: dict[int, tuple[RankState, float]] = {}
        """Of each rank the last heartbeat, and when it came."""
        self._hung: Mapping[int, RankState] = {}
        """What was known of the ranks when this one reported that the run hangs."""
        self._probed: dict[int, float] = {}
        self._stragglers: Stragglers | None = None
        self._call: network.StoreCall | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._launcher: int | None = None

    def start(self, store: JsonStore | None = None, launcher: int | None = None) -> None:
        """Start to watch; ``store``: of the run; ``launcher``: the PID of the parent, if this rank must not outlive it."""
        self._launcher = launcher
        if store is not None:
            self.heartbeat = Heartbeat(store, self.me, self.ranks, self.progress, self.lost_code)
        elif not self.limit and launcher is None:
            return
        with suppress(RuntimeError, ValueError, OSError):  # without a standard error
            faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)  # kill -QUIT shows where a process is
        # a thread, not a signal: the main thread may be in a collective, where Python runs no handlers
        self._thread = threading.Thread(target=self._run, name="hpclm-watchdog", daemon=True)
        self._thread.start()
        if launcher is not None:
            parent.end_watch()

    def leave(self) -> None:
        """This rank exits normally: nothing ends it any more, and its end is not a failure."""
        self.leaving = True
        with suppress(RuntimeError):
            if self.heartbeat:
                self.heartbeat.finish()

    def stop(self) -> None:
        """Stop watching, and leave SIGQUIT as it was: this process may be a notebook's."""
        self._over.set()
        faulthandler.unregister(signal.SIGQUIT)
        for thread in (self._thread, self._call):
            if thread is not None:
                # with a limit: the thread may be in a call to a store that never answers
                thread.join(4 * TURN)

    @property
    def in_step(self) -> bool:
        """Whether the main thread is in a step."""
        return self.phase in (STEP, FIRST)

    @property
    def watches(self) -> bool:
        """Whether the thread can still end this process because of a failure elsewhere."""
        return self._thread is not None and self._thread.is_alive() and not self.leaving

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

    def write_to(self, out: Path, name: str, record: Record, stages: int = 1) -> None:
        """Set the run directory: stacks go to its folder logs/NAME, the same on every rank. ``record`` adds an event to the run."""
        self.folder, self._record = out / "logs" / name, record
        if self.me.rank == 0:
            self._stragglers = Stragglers(self.ranks, record, stages)

    def progress(self) -> RankState:
        """What this rank sends the others in its heartbeats."""
        patience = FOREVER if self.phase in UNLIMITED else max(PATIENCE_FACTOR * self.limit, MIN_PATIENCE_SECONDS)
        if self.phase == STEP:
            # a run whose regular steps take longer than the limit must not be taken for one that hangs
            patience = max(self.limit, 2 * self._longest)
        location, waits_in = hang.position(self.waits_in)
        return RankState(
            clock=self.now,
            phase=self.phase,
            step=self.step,
            idle=self.now - self._moved,
            patience=patience,
            location=location,
            waits_in=waits_in,
            work=self.timer.work,
            step_seconds=self.timer.seconds,
        )

    # the following runs in the watchdog thread

    def _run(self) -> None:
        main, judged = threading.main_thread(), 0.0
        while main.is_alive() and not self._over.wait(TURN):
            moment = time.monotonic()
            # a clock of this process: an hour in which it was suspended counts as a second
            self.now, self._last = self.now + min(moment - self._last, PAUSED), moment
            try:
                self._look_for_failure()
                if not self.leaving:
                    self.each_turn()
                if self.now - judged >= JUDGE:
                    judged = self.now
                    self._judge()
            except Exception:  # a fault of the watchdog must not end a run that trains
                log.debug("the watchdog failed", exc_info=True)

    def end(self, text: str, code: int = ExitCode.REQUEUE) -> None:
        """End the run with ``code``, for a reason that is said completely; any thread may call this."""
        self._fail(Failure(self.me.rank, "late", code, text))

    def _ask(self, call: Callable[[], Any], seconds: float) -> Any:
        """What ``call()``, a question to the store, answers within ``seconds``, or None; one at a time."""
        if self._call is not None:
            self._call.join(seconds)
            # one question at a time: while the store is stopped, threads would pile up
            if self._call.is_alive():
                return None
        self._call = network.StoreCall(call)
        return self._call.result(seconds)

    def _launcher_is_gone(self) -> bool:
        return self._launcher is not None and os.getppid() != self._launcher

    def _look_for_failure(self) -> None:
        heart = self.heartbeat
        if heart is not None and not self.leaving:
            self._ask(heart.exchange, TURN)
        if self.leaving:  # perhaps only now, and rank 0 may have closed the store
            return
        if heart and heart.lost:
            processes.wait_until(self._launcher_is_gone, SETTLE)  # the store was its
        if self._launcher_is_gone():
            self._fail(Failure(self.me.rank, "launcher", self.lost_code))
        elif heart and heart.failure:
            self._exit(heart.failure, heart.store)
        elif heart and heart.lost:
            # the store is rank 0's, so without it rank 0 is gone
            self._exit(Failure(0, "killed", self.lost_code))

    def _fail(self, cause: Failure) -> None:
        """End the run because of ``cause``, unless another rank has published one before."""
        first = self._publish(cause)
        self._exit(first or cause, self.heartbeat.store if first and self.heartbeat else None)

    def _publish(self, cause: Failure) -> Failure | None:
        """Publish ``cause``; the first failure, or None if the store does not answer."""
        heart = self.heartbeat
        if heart is None or heart.lost:
            return None
        return self._ask(lambda: failure.publish(heart.store, cause), WAKE)

    def _exit(self, cause: Failure, store: JsonStore | None = None) -> None:
        """Exit because of ``cause``; ``store``: if it answers."""
        if not self.shutdown.claim():
            return
        exit_after(3 * WAKE, cause.code)  # a disk may be why it hangs
        text = self.shutdown.recorded() or cause.describe(self.ranks)
        ends.note(cause.code, text)
        if cause.rank == 0 and cause.kind in ("killed", "lost"):
            store = None  # it will not log the failure
        elif cause.kind == "hung":
            processes.wake(info.pid for info in self.neighbours)  # so that they exit too
            with suppress(OSError):
                if self.folder:
                    hang.write_stacks(self.folder, self.me, self.progress())
            if cause.rank == self.me.rank:
                self._end_hang(text, store)
            text = ""  # that has logged it
        self.shutdown.exit(text, cause.code, store)

    def _judge(self) -> None:
        states = self._states()
        if self._stragglers is not None:
            self._stragglers.update(states)
        if not self.limit or self.leaving:
            return
        for rank, state in states.items():
            # silence alone may be a process that is stopped or swapped out; a host that does not answer is gone
            if state.silent > SILENCE and self._unreachable(rank):
                info = self.ranks[rank]
                text = f"{info} was lost: no heartbeat for {state.silent:.0f} s, and its host does not answer"
                trouble = self.job.troubles([info.host], seconds=2.0)
                says = f". {self.job.scheduler} says that "
                self._fail(Failure(rank, "lost", self.lost_code, says.join([text, *trouble])))
        # one judge, so that ranks do not report different culprits
        if self.me.rank and states.get(0, RankState()).silent <= self.limit:
            return  # rank 0 judges
        late = all(state.idle > state.patience for state in states.values())
        # once this rank has completed a step, all have begun one, whatever a silent rank sent last
        begun = [rank for rank, state in states.items() if self.timer.steps or state.patience < FOREVER]
        if late or any(states[rank].silent > 2 * self.limit for rank in begun):
            self._report_hang(states)

    def _states(self) -> dict[int, RankState]:
        """What is known of the ranks."""
        states = {}
        for rank, beat in dict(self.heartbeat.received if self.heartbeat else {}).items():
            before, moment = self._heard.get(rank, (None, self.now))
            self._heard[rank] = beat, moment if beat == before else self.now
            silent = self.now - self._heard[rank][1]
            # heartbeats come once a second, and one of them may be late
            if silent > 2 * PAUSED:
                stopped = self.ranks[rank] in self.neighbours and processes.stopped(self.ranks[rank].pid)
                beat = replace(beat, silent=silent, idle=beat.idle + silent, stopped=stopped)
            states[rank] = beat
        return {**states, self.me.rank: self.progress()}

    def _unreachable(self, rank: int) -> bool:
        """Whether the host of a silent rank does not respond; probed at most every SILENCE seconds."""
        info = self.ranks[rank]
        if info.node == self.me.node or not info.address or self.now < self._probed.get(rank, 0.0):
            return False
        self._probed[rank] = self.now + SILENCE
        return network.answers(info.address, network.DISCARD, seconds=5.0) is None

    # the end of a run that hangs

    def _report_hang(self, states: Mapping[int, RankState]) -> None:
        """Publish which ranks block the others, and exit, as all do who read it."""
        heart = self.heartbeat
        processes.wake(info.pid for info in self.neighbours)  # rank 0, if it is one, may have the store
        if heart and self._ask(lambda: heart.receive(len(self.ranks)), WAKE):
            states = self._states() | {rank: state for rank, state in states.items() if state.silent}
        self._hung = states
        self._fail(Failure(self.me.rank, "hung", ExitCode.REQUEUE, hang.report(states, self.ranks, self.folder)))

    def _end_hang(self, text: str, store: JsonStore | None) -> None:
        """Log the report, and kill ranks of this machine that do not read it, since they would never exit; first they print
        their stacks."""
        with suppress(OSError):
            if self._record:
                self._record("hang", **hang.facts(text, self._hung, self.ranks))
        self.shutdown.log_failure(text)
        if store is not None:
            keys = {info.pid: rank_key("read", info.rank) for info in self.neighbours}
            processes.wait_until(lambda: all(map(store.get, keys.values())), WAKE)
            silent = [pid for pid, key in keys.items() if not store.get(key)]
            # SIGQUIT first, for the stacks that faulthandler prints: they are all that is ever learned of such a rank
            for number in (signal.SIGQUIT, signal.SIGKILL) if silent else ():
                for pid in silent:
                    processes.send_signal(pid, number)
                time.sleep(1.0 if number == signal.SIGQUIT else 0.0)
