"""A thread that exchanges heartbeats through the store: this rank's progress, that of the others, and the first
failure.

If a rank has lost a connection and no rank knows why, there is a roll call: each rank answers, and those that do not
are lost. PyTorch's client waits without a limit for a server that does not answer. So the watchdog, which must keep working if
rank 0 is stopped, is another thread: it reads the fields of this one.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hpclm.distributed import failure
from hpclm.distributed.failure import Failure
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.shutdown import read_key
from hpclm.distributed.signed import SignedStore
from hpclm.node.processes import wait_until

POLL = 0.25  # seconds between checks for a failure
SEND = 1.0  # between two heartbeats of this rank
SETTLE = 0.5  # seconds until the end of a process is visible after that of its connections
RECEIVE = 1.0  # between two readings of the others'
ROLL_CALL = 3.0  # that ranks have to answer; Slurm kills what it ends after KillWait, 30 s unless the site changed it
Progress = dict[str, Any]


class LocalPeers:
    """The other ranks of this host, by handles that the kernel makes readable when a process ends (Linux 5.3)."""

    def __init__(self, me: RankInfo, ranks: Sequence[RankInfo], watch_launcher: bool = True):
        self._launcher = os.getppid() if watch_launcher else None
        self._handles: dict[int, int] = {}
        self._poll = select.poll()
        for info in ranks:
            if info.machine == me.machine and info.rank != me.rank:
                with suppress(OSError, AttributeError):
                    handle = os.pidfd_open(info.pid)
                    self._handles[handle] = info.rank
                    self._poll.register(handle, select.POLLIN)

    def ended(self) -> list[int]:
        """Ranks whose processes have ended since the last call."""
        found = []
        for handle, _ in self._poll.poll(0):
            self._poll.unregister(handle)
            os.close(handle)
            found.append(self._handles.pop(handle))
        return sorted(found)

    def launcher_gone(self) -> bool:
        """Whether the parent of this process has ended."""
        return self._launcher is not None and os.getppid() != self._launcher

    def close(self) -> None:
        """Close the handles."""
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()


class Heartbeat(threading.Thread):
    """Sends ``progress()`` every second, and keeps the last heartbeats in ``received``: of rank 0, on rank 0 of all."""

    def __init__(
        self,
        store: SignedStore,
        me: RankInfo,
        ranks: Sequence[RankInfo],
        progress: Callable[[], Progress],
        peers: LocalPeers,
        lost_code: int = 1,
    ):
        """``lost_code``: exit code of the run when a rank is killed."""
        super().__init__(name="hpclm-heartbeat", daemon=True)
        self.store = store.clone()
        self.rank, self.ranks, self.progress = me.rank, ranks, progress
        self.peers, self.lost_code = peers, lost_code
        self.received: dict[int, Progress] = {}
        self.failure: Failure | None = None
        self.lost = ""
        """Why the connection to the store was lost; empty while it works."""
        self.answered = time.monotonic()
        """When the store last answered."""
        self._watched = range(len(ranks) if me.rank == 0 else 1)
        self._called: float | None = None
        """When this rank answered the roll call."""
        self._over = threading.Event()
        self._send(time.monotonic())

    def run(self) -> None:
        """Run until ``stop``, a failure, or the end of the store."""
        sent = read = 0.0
        try:
            while not self._over.wait(POLL):
                found = failure.read(self.store, len(self.ranks))
                if found is None or found.symptom:
                    found = self._look_around() or (self._call_the_roll(found) if found else None)
                self.answered = now = time.monotonic()
                if found:
                    self.store.set(read_key(self.rank), True)
                    self.failure = found
                    return
                if now - sent >= SEND:
                    self._send(sent := now)
                if now - read >= RECEIVE:
                    read = now
                    self._receive()
        except RuntimeError as error:
            wait_until(lambda: self.peers.launcher_gone() or 0 in self.peers.ended(), SETTLE)
            if self.peers.launcher_gone():  # and the store with it
                self.failure = Failure(self.rank, "launcher", self.lost_code)
            else:
                self.lost = str(error).splitlines()[0]

    def finish(self) -> None:
        """Record that this rank exits normally, and stop."""
        self.store.set(_exited(self.rank), True)
        self.stop()

    def stop(self) -> None:
        """Stop using the store, and wait for the thread."""
        self._over.set()
        if self.is_alive():
            self.join(4 * POLL)
        self.peers.close()

    def _look_around(self) -> Failure | None:
        """The failure implied by the end of another process on this host."""
        for rank in self.peers.ended():
            if not self.store.get(_exited(rank)):
                return self._publish(Failure(rank, "killed", self.lost_code))
        if self.peers.launcher_gone():
            return self._publish(Failure(self.rank, "launcher", self.lost_code))
        return None

    def _publish(self, found: Failure) -> Failure:
        return failure.publish(self.store, found, len(self.ranks))

    def _call_the_roll(self, symptom: Failure) -> Failure | None:
        """Answer; after ROLL_CALL the rank with the symptom publishes the cause, or another if that rank does not."""
        now = time.monotonic()
        if self._called is None:
            self._called = now
            self.store.set(_present(self.rank), True)
        if now - self._called < (ROLL_CALL if symptom.rank == self.rank else 2 * ROLL_CALL):
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

    def _send(self, now: float) -> None:
        self.store.set(_beat(self.rank), {**self.progress(), "at": round(now, 2)})

    def _receive(self) -> None:
        """Read the others' heartbeats; one that is older than the last, or no heartbeat at all, does not count."""
        for rank, word in zip(self._watched, self.store.get_all([*map(_beat, self._watched)]) or (), strict=False):
            if (
                _same_shape(word, self.progress() | {"at": 0.0})
                and word["at"] > self.received.get(rank, {"at": -1})["at"]
            ):
                self.received[rank] = word


def _same_shape(word: Any, like: Progress) -> bool:
    """Whether ``word`` has the fields of ``like``, and texts and numbers in the same ones."""
    if not isinstance(word, dict) or word.keys() != like.keys():
        return False
    return all(isinstance(word[name], str if isinstance(value, str) else (int, float)) for name, value in like.items())


def _beat(rank: int) -> str:
    """The key of a rank's heartbeat."""
    return f"hpclm/heartbeat/{rank}"


def _present(rank: int) -> str:
    """The key of a rank's answer to the roll call."""
    return f"hpclm/present/{rank}"


def _exited(rank: int) -> str:
    """The key that records that a rank has exited normally."""
    return f"hpclm/exited/{rank}"
