"""What a rank tells the others through the store, and what it learns there: heartbeats and the first failure.

If a rank has lost a connection and no rank knows why, there is a roll call: each rank answers, and those that do not
are lost.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from hpclm.distributed import failure
from hpclm.distributed.failure import Failure
from hpclm.distributed.hang import RankState
from hpclm.distributed.rendezvous import RankInfo, rank_key
from hpclm.distributed.store import JsonStore
from hpclm.node import processes

SEND = 1.0  # seconds between two heartbeats, and between two readings of the others'
ROLL_CALL = 3.0  # that ranks have to answer; Slurm kills what it ends after KillWait, 30 s unless the site changed it


class Heartbeat:
    """This rank's part of the exchange through the store."""

    def __init__(
        self,
        store: JsonStore,
        me: RankInfo,
        ranks: Sequence[RankInfo],
        progress: Callable[[], RankState] = RankState,
        lost_code: int = 1,
    ):
        """``progress()``: what this rank sends. ``lost_code``: exit code of the run when a rank is killed."""
        # a connection of its own: a request on the main thread's may wait for minutes
        self.store = store.clone()
        self.me, self.ranks, self.progress, self.lost_code = me, ranks, progress, lost_code
        self._neighbours = me.neighbours(ranks)
        self.received: dict[int, RankState] = {}
        """The last heartbeats: of rank 0, on rank 0 of all."""
        self.failure: Failure | None = None
        self.lost = False
        """Whether the store is gone."""
        self._called: float | None = None
        """When this rank answered the roll call."""
        self._sent = 0.0
        self.send()

    def exchange(self) -> None:
        """Look for a failure and, once a second, send and receive heartbeats.

        This blocks while the process of the store is stopped, because PyTorch's client has no time limit.
        """
        if self.failure or self.lost:
            return
        try:
            first = failure.read(self.store)
            if first is None or first.symptom:
                first = self._killed() or (self._call_the_roll(first) if first else None)
            if first:
                self.store.set(rank_key("read", self.me.rank), True)
                self.failure = first
            elif time.monotonic() - self._sent >= SEND:
                self._sent = time.monotonic()
                self.send()
                # rank 0 judges for all; if every rank read every heartbeat, requests would grow with the square of the
                # ranks
                self.receive(len(self.ranks) if self.me.rank == 0 else 1)
        except RuntimeError:
            self.lost = True

    def send(self) -> None:
        """Send this rank's heartbeat."""
        self.store.set(rank_key("heartbeat", self.me.rank), asdict(self.progress()))

    def receive(self, size: int) -> bool:
        """Read the first ``size`` ranks' heartbeats. True once that is done."""
        for rank, beat in enumerate(self.store.get_all([rank_key("heartbeat", rank) for rank in range(size)]) or []):
            self.received[rank] = RankState(**beat)
        return True

    def finish(self) -> None:
        """Record that this rank exits normally."""
        self.store.set(rank_key("exited", self.me.rank), True)

    def _killed(self) -> Failure | None:
        """The failure implied by the end of another process of this machine."""
        for info in self._neighbours:
            # a rank that ends normally says so first (finish), so an end without that is a kill
            if processes.started(info.pid) is None and not self.store.get(rank_key("exited", info.rank)):
                return self._publish(Failure(info.rank, "killed", self.lost_code))
        return None

    def _publish(self, cause: Failure) -> Failure:
        return failure.publish(self.store, cause)

    def _call_the_roll(self, symptom: Failure) -> Failure | None:
        """Answer; after ROLL_CALL the rank with the symptom publishes the cause, or another if that rank does not."""
        now = time.monotonic()
        if self._called is None:
            self._called = now
            self.store.set(rank_key("present", self.me.rank), True)
        # another rank only steps in when the one with the symptom does not, so that one of them decides
        if now - self._called < (ROLL_CALL if symptom.rank == self.me.rank else 2 * ROLL_CALL):
            return None
        gone = [
            i
            for i in range(len(self.ranks))
            if not (self.store.get(rank_key("present", i)) or self.store.get(rank_key("exited", i)))
        ]
        if gone:
            verb = "was" if len(gone) == 1 else "were"
            text = f"{failure.named(gone, self.ranks)} {verb} lost (killed, or the node or its network is down)"
            return self._publish(Failure(gone[0], "lost", self.lost_code, text))
        # all answer: the error was no lost connection but looked like one, so it is the cause
        if not failure.CLOSED.search(symptom.text):
            return self._publish(replace(symptom, kind="raised", code=1))
        text = f"it lost a connection, but all ranks respond, so the network may be at fault:\n{symptom.text}"
        return self._publish(replace(symptom, kind="raised", text=text))
