"""What a rank tells the others through the store, and what it learns there: heartbeats and the first failure.

If a rank has lost a connection and no rank knows why, there is a roll call: each rank answers, and those that do not
are lost.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hpclm.distributed import failure
from hpclm.distributed.failure import Failure
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.shutdown import read_key
from hpclm.distributed.signed import SignedStore
from hpclm.distributed.store_limits import StoreLimits
from hpclm.node import processes

SEND = 1.0  # seconds between two heartbeats, and between two readings of the others'
SETTLE = 0.5  # until the end of a process is visible after that of its connections
ROLL_CALL = 3.0  # that ranks have to answer; Slurm kills what it ends after KillWait, 30 s unless the site changed it
Progress = dict[str, Any]


class Heartbeat:
    """This rank's part of the exchange through the store."""

    def __init__(
        self,
        store: SignedStore,
        me: RankInfo,
        ranks: Sequence[RankInfo],
        progress: Callable[[], Progress],
        lost_code: int = 1,
        launcher: int | None = None,
    ):
        """``progress()``: what this rank sends. ``lost_code``: exit code of the run when a rank is killed. ``launcher``: the PID
        of the process that the ranks must not outlive."""
        self.store = store.clone()
        self.me, self.ranks, self.progress = me, ranks, progress
        self.lost_code, self.launcher = lost_code, launcher
        self.received: dict[int, Progress] = {}
        """The last heartbeats: of rank 0, on rank 0 of all."""
        self.failure: Failure | None = None
        self.lost = ""
        """Why the connection to the store was lost; empty while it works."""
        self.answered = time.monotonic()
        """When the store last answered."""
        self._neighbours = [info for info in ranks if info.machine == me.machine and info.rank != me.rank]
        self._called: float | None = None
        """When this rank answered the roll call."""
        self._sent = 0.0
        self._limits = StoreLimits(store, len(ranks)) if me.rank == 0 else None
        self.send()

    def exchange(self) -> None:
        """Look for a failure and, once a second, send and receive heartbeats.

        This blocks while the process of the store is stopped, because PyTorch's client has no time limit.
        """
        if self.failure or self.lost:
            return
        try:
            first = failure.read(self.store, len(self.ranks))
            if first is None or first.symptom:
                first = self._killed() or (self._call_the_roll(first) if first else None)
            self.answered = now = time.monotonic()
            if first:
                self.store.set(read_key(self.me.rank), True)
                self.failure = first
            elif now - self._sent >= SEND:
                self._sent = now
                self.send()
                self.receive(len(self.ranks) if self.me.rank == 0 else 1)
                if self._limits:
                    self._limits.enforce()
        except RuntimeError as error:
            processes.wait_until(lambda: self.launcher_gone() or _ended(self.ranks[0], self.me), SETTLE)
            if self.launcher_gone():  # and the store with it
                self.failure = Failure(self.me.rank, "launcher", self.lost_code)
            else:
                self.lost = str(error).partition("\n")[0] or "closed"

    def finish(self) -> None:
        """Record that this rank exits normally."""
        self.store.set(_exited(self.me.rank), True)

    def launcher_gone(self) -> bool:
        """Whether the parent of this process has ended."""
        return self.launcher is not None and os.getppid() != self.launcher

    def _killed(self) -> Failure | None:
        """The failure implied by the end of another process of this machine."""
        for info in self._neighbours:
            if _ended(info, self.me) and not self.store.get(_exited(info.rank)):
                return self._publish(Failure(info.rank, "killed", self.lost_code))
        if self.launcher_gone():
            return self._publish(Failure(self.me.rank, "launcher", self.lost_code))
        return None

    def _publish(self, cause: Failure) -> Failure:
        return failure.publish(self.store, cause, len(self.ranks))

    def _call_the_roll(self, symptom: Failure) -> Failure | None:
        """Answer; after ROLL_CALL the rank with the symptom publishes the cause, or another if that rank does not."""
        now = time.monotonic()
        if self._called is None:
            self._called = now
            self.store.set(_present(self.me.rank), True)
        if now - self._called < (ROLL_CALL if symptom.rank == self.me.rank else 2 * ROLL_CALL):
            return None
        gone = [i for i in range(len(self.ranks)) if not (self.store.get(_present(i)) or self.store.get(_exited(i)))]
        if gone:
            verb = "was" if len(gone) == 1 else "were"
            text = f"{failure.named(gone, self.ranks)} {verb} lost (killed, or the node or its network is down)"
            return self._publish(Failure(gone[0], "lost", self.lost_code, text))
        if not failure.CLOSED.search(symptom.text):
            return self._publish(replace(symptom, kind="raised", code=1))
        text = f"it lost a connection, but all ranks respond, so the network may be at fault:\n{symptom.text}"
        return self._publish(replace(symptom, kind="raised", text=text))

    def send(self) -> None:
        """Send this rank's heartbeat."""
        self.store.set(_beat(self.me.rank), {**self.progress(), "at": round(time.monotonic(), 2)})

    def receive(self, size: int) -> None:
        """Read the first ``size`` ranks' heartbeats; one that is older than the last, or no heartbeat at all, does not count."""
        beats = self.store.get_all([*map(_beat, range(size))]) or []
        own = {**self.progress(), "at": 0.0}
        for rank, beat in enumerate(beats):
            if _same_shape(beat, own) and beat["at"] > self.received.get(rank, {"at": -1})["at"]:
                self.received[rank] = beat


def _ended(info: RankInfo, me: RankInfo) -> bool:
    """Whether a rank of this machine has ended."""
    return info.machine == me.machine and info.rank != me.rank and processes.started(info.pid) is None


def _same_shape(beat: Any, like: Progress) -> bool:
    """Whether ``beat`` has the fields of ``like``, and texts and numbers in the same ones."""
    if not isinstance(beat, dict) or beat.keys() != like.keys():
        return False
    return all(isinstance(beat[name], str if isinstance(value, str) else (int, float)) for name, value in like.items())


def _beat(rank: int) -> str:
    """The key of a rank's heartbeat."""
    return f"hpclm/heartbeat/{rank}"


def _present(rank: int) -> str:
    """The key of a rank's answer to the roll call."""
    return f"hpclm/present/{rank}"


def _exited(rank: int) -> str:
    """The key that records that a rank has exited normally."""
    return f"hpclm/exited/{rank}"
