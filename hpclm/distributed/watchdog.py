"""The watchdog thread of each rank: it detects that the run makes no progress, or has failed.

The main thread reports its phase (``enter``), and every collective counts as progress (``tick``). The heartbeat thread
sends that to the store, and rank 0's watchdog judges all ranks by it. A run hangs if every rank has been in its phase
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
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpclm.config import ClusterConfig
from hpclm.distributed import bootstrap, failure, flight_recorder, hang, network, restart, stacks
from hpclm.distributed.failure import Failure
from hpclm.distributed.hang import RankState
from hpclm.distributed.heartbeat import Heartbeat
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.shutdown import Shutdown
from hpclm.distributed.signed import SignedStore
from hpclm.distributed.stacks import Position
from hpclm.distributed.stragglers import Stragglers, WorkTimer
from hpclm.errors import REQUEUE
from hpclm.node import processes

log = logging.getLogger(__name__)

LOOK = 0.05  # seconds between samples of the main thread
JUDGE = 0.5  # between checks of the other ranks
LONGEST_LOOK = 1.0  # a longer interval between samples means that this process did not run
RECENT = 30.0  # seconds for which a pause of this process is remembered
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
        self.phase, self.step, self.ticks, self.steps = "", 0, 0, 0
        self.leaving = False
        self.waits_in = ""
        """The operation of all ranks that the main thread waits in (``context.waits_in``); empty if in none."""
        self.out: Path | None = None
        self.folder: Path | None = None
        self.now = 0.0
        """Seconds in which this process ran, according to its samples."""
        self._entered = self._longest = 0.0
        self._last, self._pause = time.monotonic(), (-math.inf, 0.0)
        self._timer = WorkTimer()
        self._stragglers = Stragglers(settings.slow, ranks)
        self._seen: dict[int, tuple[Any, float, int, float]] = {}
        self._probed: dict[int, float] = {}
        self._over = threading.Event()
        self._launcher: int | None = None

    def start(self, heartbeat: Heartbeat | None = None, launched: bool = False) -> None:
        """Start to watch; ``launched``: in a process without peers, also whether its parent is alive."""
        self.heartbeat = heartbeat
        self._launcher = os.getppid() if launched else None
        if heartbeat is None and not self.limit and not launched:
            return
        with suppress(RuntimeError, ValueError, OSError):  # without a standard error
            faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)  # kill -QUIT shows where a process is
        threading.Thread(target=self._run, name=f"{stacks.HELPERS}watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching, and leave SIGQUIT as it was: this process may be a notebook's."""
        self._over.set()
        faulthandler.unregister(signal.SIGQUIT)

    def enter(self, phase: str, step: int | None = None) -> None:
        """The main thread begins ``phase``, of or after ``step``; no other thread calls this."""
        if self.phase in (STEP, FIRST):
            self._longest = max(self._longest, self.now - self._entered)
            self.steps += 1
        self._entered = self.now
        self.phase = FIRST if phase == STEP and not self.steps else phase
        self.step = self.step if step is None else step
        self.ticks += 1

    def tick(self) -> None:
        """The main thread makes progress within its phase."""
        self.ticks += 1

    def position(self) -> Position:
        """What this process does, or waits for."""
        found = stacks.position()
        return replace(found, collective=found.collective or self.waits_in)

    def write_to(self, out: Path, name: str, stages: int = 1) -> None:
        """Set the run directory: stacks go to its folder logs/NAME, the same on every rank."""
        self.out, self.folder = out, out / "logs" / name
        if self.me.rank == 0:
            self._stragglers.begin(out / "ranks.json", stages)

    def progress(self) -> dict[str, Any]:
        """What this rank sends the others in its heartbeats."""
        count = {"steps": self.steps, "work": round(self._timer.work, 3), "total": round(self._timer.total, 3)}
        return {"phase": self.phase, "step": self.step, "ticks": self.ticks, **count}

    # the following runs in the watchdog thread

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
                self._timer.look(min(passed, LONGEST_LOOK), LOOK, self.phase in (STEP, FIRST))
                self._look_for_failure()
                if moment - judged > JUDGE:
                    judged = moment
                    self._judge()
            except Exception:  # a fault of the watchdog must not end a run that trains
                log.debug("the watchdog failed", exc_info=True)

    def _look_for_failure(self) -> None:
        heart = self.heartbeat
        if self._launcher is not None and os.getppid() != self._launcher:
            self._exit(Failure(self.me.rank, "launcher", 1))
        if heart is None or self.leaving:
            return
        if heart.failure:
            self._exit(heart.failure)
        elif heart.lost:
            self._exit(Failure(0, "killed", self.lost_code), store_answers=False)

    def _exit(self, found: Failure, store_answers: bool = True) -> None:
        """Exit because of ``found``."""
        if not self.shutdown.claim():
            return
        reachable = self.heartbeat.store if store_answers and self.heartbeat else None
        if found.kind == "hung" and reachable is not None:
            self._join_report(found, reachable)
        if found.rank == 0 and found.kind in ("killed", "lost"):
            reachable = None  # it will not log the failure
        self.shutdown.exit(found.describe(self.ranks), found.code, reachable)

    def _judge(self) -> None:
        words = {**(self.heartbeat.received if self.heartbeat else {}), self.me.rank: self.progress()}
        if self.me.rank == 0 and len(words) == len(self.ranks):
            self._stragglers.update(words, self.step)
        states = {rank: self._state(rank, word) for rank, word in words.items()}
        if not self.limit or self.leaving:
            return
        for rank, state in states.items():
            if state.silent > SILENCE and rank != self.me.rank and self._unreachable(rank):
                self._fail(rank, state.silent)
        if self.me.rank and states.get(0, RankState("", 0, 0)).silent <= self.limit:
            return  # rank 0 handles it
        late = {rank for rank, state in states.items() if state.seconds > self._allowance(state.phase)}
        gone = {rank for rank, state in states.items() if self._silent_too_long(state)}
        if (len(late) < len(states) and not gone) or (self.heartbeat is None and stacks.position().debugged):
            return
        if self.shutdown.claim():
            self._report(states)

    def _state(self, rank: int, word: dict[str, Any]) -> RankState:
        """What is known of ``rank`` from its last heartbeat."""
        before, heard, count, moved = self._seen.get(rank, (None, self.now, 0, self.now))
        if word != before:
            before, heard = word, self.now
        if word["ticks"] != count:
            count, moved = word["ticks"], self.now
        self._seen[rank] = (before, heard, count, moved)
        info, silent = self.ranks[rank], 0.0 if rank == self.me.rank else self.now - heard
        local = info.machine == self.me.machine and silent > JUDGE
        return RankState(word["phase"], word["step"], self.now - moved, silent, local and processes.stopped(info.pid))

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
        trouble = restart.trouble(self.ranks[rank].host, seconds=2.0) if bootstrap.job() else ""
        text += f". Slurm says that {trouble}" * bool(trouble)
        found = Failure(rank, "lost", self.lost_code, text)
        store = self._store()
        self._exit(failure.publish(store, found, len(self.ranks)) if store is not None else found, store is not None)

    def _silent_too_long(self, state: RankState) -> bool:
        """Whether a rank has been silent for so long that its phase no longer matters."""
        # once this rank has completed a step, all have begun one, whatever a silent rank sent last
        unlimited = state.phase in UNLIMITED and not self.steps
        return state.silent > self.limit * (1 if state.stopped else math.inf if unlimited else 2)

    def _allowance(self, phase: str) -> float:
        """Seconds that a rank may be in a phase."""
        if phase in UNLIMITED:
            return math.inf
        return max(self.limit, 2 * self._longest) if phase == STEP else max(PATIENT * self.limit, LEAST)

    def _paused(self) -> float:
        """Seconds for which this process recently did not run."""
        moment, (when, seconds) = time.monotonic(), self._pause
        return max(moment - self._last, seconds if moment - when < RECENT else 0.0)

    # the end of a run that hangs

    def _store(self) -> SignedStore | None:
        """The store, if it responds: otherwise a client would wait forever."""
        heart = self.heartbeat
        return heart.store if heart and not heart.lost and time.monotonic() - heart.answered < ANSWER else None

    def _answer(self) -> dict[str, Any]:
        """Write this process's stacks, and return its position."""
        found, paused = self.position(), self._paused()  # before what follows looks like a pause
        if self.folder:
            with suppress(OSError):  # a disk may be why it hangs
                path = self.folder / f"rank-{self.me.rank:05d}.txt"
                stacks.write(path, f"{self.me}, {self.phase} {self.step}: {found.location}")
                flight_recorder.dump(self.folder / flight_recorder.FOLDER, self.me.rank)
        return {**asdict(found), "paused": paused}

    def _wake(self) -> None:
        """Continue stopped ranks of this machine, so that they can report their position and exit."""
        here = [info for info in self.ranks if info.machine == self.me.machine and info.rank != self.me.rank]
        processes.wake(info.pid for info in here)

    def _join_report(self, found: Failure, store: SignedStore) -> None:
        """Report this rank's position, and wait for the hang report of another rank."""
        store.set(_position(self.me.rank), self._answer())
        self._wake()
        with suppress(RuntimeError):
            store.wait(REPORTED, REPORT, pause=0.1)
        self.shutdown.exit("", found.code)

    def _report(self, states: dict[int, RankState]) -> None:
        """Collect the positions of all ranks, write the hang report, and end the run."""
        code = REQUEUE if self.settings.hang == "requeue" else 1
        mine = self._answer()  # before the time spent here looks like a pause
        self._wake()
        if self._store() is None and self.heartbeat:  # rank 0 may have been stopped, and needs a moment
            time.sleep(WAKE / 2 + 0.1 * min(self.me.rank, 20))
        store = self._store()
        if store is not None:
            first = failure.publish(store, Failure(self.me.rank, "hung", code), len(self.ranks))
            if first.kind != "hung":
                self.shutdown.exit(first.describe(self.ranks), first.code, store)
            if first.rank != self.me.rank:
                self._join_report(first, store)
        answers = {self.me.rank: mine} | self._ask(store, states)
        states = {rank: self._completed(state, answers.get(rank)) for rank, state in states.items()}
        then = "the run ends with exit code 1, as cluster.hang=stop says"
        if code == REQUEUE:
            then = "the run ends with exit code 85: the job, or the same command, resumes from its last checkpoint"
        recorded = flight_recorder.how_to_read(self.folder / flight_recorder.FOLDER) if self.folder else ""
        text = hang.report(states, self.ranks, self.folder, f"{recorded}; {then}" if recorded else then)
        if self.out:
            with suppress(OSError):
                hang.write(self.out / "hang.json", text, states, self.ranks)
        if self.me.rank and self.shutdown.log:  # rank 0 may not be able to
            with suppress(OSError):
                self.shutdown.log_failure(text)
        else:
            log.error(text)
        if store is not None:
            store.set(REPORTED, True)
        self._kill_silent({rank for rank in states if rank not in answers})
        self.shutdown.exit("", code)

    def _kill_silent(self, ranks: Collection[int]) -> None:
        """Let ranks of this machine that do not respond print their stacks, and kill them, since they would never exit."""
        here = [self.ranks[rank].pid for rank in ranks if self.ranks[rank].machine == self.me.machine]
        for number in (signal.SIGQUIT, signal.SIGKILL):
            for pid in here:
                with suppress(OSError):
                    os.kill(pid, number)
            time.sleep(1.0 if here and number == signal.SIGQUIT else 0.0)

    def _ask(self, store: SignedStore | None, states: dict[int, RankState]) -> dict[int, dict[str, Any]]:
        """The positions of the other ranks, of those that respond."""
        if store is None:
            return {}
        keys = {info.rank: _position(info.rank) for info in self.ranks if info.rank != self.me.rank}
        silent = any(state.silent > self.limit for state in states.values())
        processes.wait_until(lambda: store.get_all([*keys.values()]), WAKE if silent else ANSWER, pause=0.1)
        answers = {rank: store.get(key) for rank, key in keys.items()}
        known = {*Position.__dataclass_fields__, "paused"}
        return {rank: answer for rank, answer in answers.items() if isinstance(answer, dict) and answer.keys() == known}

    def _completed(self, state: RankState, answer: dict[str, Any] | None) -> RankState:
        """``state`` with what the rank itself reported."""
        if answer is None:
            return state
        stopped = state.stopped or answer["paused"] > self.limit / 2
        known = Position(answer["location"], answer["collective"], answer["debugged"])
        return replace(state, silent=0.0, stopped=stopped, position=known)


def _position(rank: int) -> str:
    """The key under which a rank reports where it is."""
    return f"hpclm/position/{rank}"
