"""A thread that exchanges heartbeats through the store: this rank's progress, that of the others, and the first
failure.

PyTorch's client waits without a limit for a server that does not answer. So the watchdog, which must keep working if
rank 0 is stopped, is another thread: it reads the fields of this one.
"""

import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpclm.distributed import failure
from hpclm.distributed.failure import Failure
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.shutdown import READ
from hpclm.node.processes import wait_until

if TYPE_CHECKING:
    from torch.distributed import Store

POLL = 0.25  # seconds between checks for a failure
SEND = 1.0  # between two heartbeats of this rank
SETTLE = 0.5  # seconds until the end of a process is visible after that of its connections
RECEIVE = 1.0  # between two readings of the others'
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
    """Sends ``progress()`` every second, and keeps the last heartbeats of the ranks ``watched`` in ``received``."""

    def __init__(
        self,
        store: "Store",
        rank: int,
        watched: Sequence[int],
        progress: Callable[[], Progress],
        peers: LocalPeers,
        lost_code: int = 1,
    ):
        """``lost_code``: exit code of the run when a rank is killed."""
        super().__init__(name="hpclm-heartbeat", daemon=True)
        self.store: Store = store.clone()  # type: ignore[attr-defined]
        self.rank, self.watched, self.progress = rank, tuple(watched), progress
        self.peers, self.lost_code = peers, lost_code
        self.received: dict[int, Progress] = {}
        self.failure: Failure | None = None
        self.lost = ""
        """Why the connection to the store was lost; empty while it works."""
        self.answered = time.monotonic()
        """When the store last answered."""
        self._keys = [f"hpclm/heartbeat/{each}" for each in self.watched]
        self._over = threading.Event()
        self._send(time.monotonic())

    def run(self) -> None:
        """Run until ``stop``, a failure, or the end of the store."""
        sent = read = 0.0
        try:
            while not self._over.wait(POLL):
                self.failure = failure.read(self.store) or self._look_around()
                self.answered = now = time.monotonic()
                if self.failure:
                    self.store.add(READ, 1)
                    return
                if now - sent >= SEND:
                    self._send(sent := now)
                if now - read >= RECEIVE and self.store.check(self._keys):
                    read = now
                    found = map(json.loads, self.store.multi_get(self._keys))
                    self.received = dict(zip(self.watched, found, strict=True))
        except RuntimeError as error:
            wait_until(lambda: self.peers.launcher_gone() or 0 in self.peers.ended(), SETTLE)
            if self.peers.launcher_gone():  # and the store with it
                self.failure = Failure(self.rank, "launcher", self.lost_code)
            else:
                self.lost = str(error).splitlines()[0]

    def finish(self) -> None:
        """Record that this rank exits normally, and stop."""
        self.store.set(_exited(self.rank), "1")
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
            if not self.store.check([_exited(rank)]):
                return failure.publish(self.store, Failure(rank, "killed", self.lost_code))
        if self.peers.launcher_gone():
            return failure.publish(self.store, Failure(self.rank, "launcher", self.lost_code))
        return None

    def _send(self, now: float) -> None:
        self.store.set(f"hpclm/heartbeat/{self.rank}", json.dumps({**self.progress(), "at": round(now, 2)}))


def _exited(rank: int) -> str:
    """The key that records that a rank has exited normally."""
    return f"hpclm/exited/{rank}"
