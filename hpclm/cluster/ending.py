"""How a run of several processes ends when one of them dies: all are gone within seconds, and the first cause is told.

Each rank keeps the connection of the roll call. A rank that fails sends its traceback; one that is killed cannot, but its
connection breaks. Rank 0 gathers such news for a moment, since the others fail too as soon as they miss a peer, tells the
first cause, and then every process kills its children and leaves. When it is rank 0 that dies, the others see it at once.
"""

import os
import selectors
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from hpclm.cluster import children
from hpclm.cluster.rollcall import Guest, Host, Present, ranges
from hpclm.cluster.wire import Wire
from hpclm.errors import HpclmError

LONGEST = 1 << 16  # characters of a cause that are told
GATHER = 1.0  # seconds in which later failures count as caused by the first
VERDICT = 5.0  # seconds that a failing rank waits to be told the cause


@dataclass(frozen=True)
class Death:
    """What is known of a rank's end."""

    rank: int
    text: str = ""
    """Message, or traceback; empty for a rank that is gone without a word."""
    code: int = 1
    caused: bool = False
    """It only lost a peer."""


def verdict(deaths: Sequence[Death], everyone: Sequence[Present]) -> tuple[str, int]:
    """What to tell of ``deaths`` (in the order they were heard of), first causes first, and the exit code of the first."""
    order = sorted(deaths, key=lambda death: (death.caused, not death.text))
    told, lines = [], []
    for death in order:
        if death.caused or death.text in told:
            continue
        same = [other.rank for other in order if other.text == death.text and not other.caused] if death.text else []
        if len(same) > 1:
            lines.append(f"ranks {ranges(same)} failed: {death.text.strip()}")
            told.append(death.text)
        elif death.text:
            lines.append(f"{everyone[death.rank]} failed: {death.text.strip()}")
        else:
            lines.append(
                f"{everyone[death.rank]} is gone without a word: killed (out of memory?), crashed, or its node is down"
            )
    lost = [death.rank for death in order if death.caused]
    if not lines:  # nobody knows the cause
        lines = [f"{everyone[death.rank]} failed: {death.text.strip()}" for death in order[:1]]
    elif lost:
        lines.append(f"then rank{'s' * (len(lost) != 1)} {ranges(lost)} lost the connection")
    return "\n".join(lines), order[0].code


class Line(ABC):
    """This process's line to the others; ``die`` when it fails, ``leave`` when it is done."""

    def __init__(self, me: Present, everyone: Sequence[Present]):
        self.me, self.everyone = me, everyone
        self.tell: Callable[[str, bool], None] = lambda text, speaker: None
        """Called with the cause of an ending, and whether this process tells it on behalf of all."""
        self._over = threading.Event()
        self._leaving = threading.Event()
        os.register_at_fork(after_in_child=self._forget)

    @abstractmethod
    def _forget(self) -> None:
        """In a forked child: close its copies of the connections, or the others would not see this process's end."""

    @abstractmethod
    def leave(self) -> None:
        """Say that this process ends as it should; call it once all have come to their end."""

    @abstractmethod
    def die(self, text: str, code: int, caused: bool) -> None:
        """Say that this process fails, of ``text``, and wait for what follows; ``caused``: it only lost a peer."""

    def _end(self, text: str, code: int, speaker: bool) -> NoReturn:
        """Tell the cause, and take everything of this process down. Runs beside a main thread that may never return."""
        late = threading.Timer(3.0, os._exit, args=(code,))  # whatever a lock or a dead disk does
        late.daemon = True
        late.start()
        children.kill()
        self.tell(text, speaker)
        sys.stderr.flush()
        os._exit(code)


class HostLine(Line):
    """Rank 0's: hears everyone, tells everyone."""

    def __init__(self, me: Present, host: Host):
        super().__init__(me, host.everyone)
        self.wires = dict(host.wires)
        self._own: Death | None = None
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="hpclm-line", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Tell the others that the run is over."""
        self._leaving.set()
        for wire in self.wires.values():
            wire.send(bye=0)

    def _forget(self) -> None:
        for wire in self.wires.values():
            wire.socket.close()

    def die(self, text: str, code: int, caused: bool) -> None:
        """Give up; returns once the others know, or never where another rank's failure came first."""
        self._own = Death(self.me.rank, shortened(text), code, caused)
        self._wake.send(b"x")
        self._over.wait(VERDICT)

    def _watch(self) -> None:
        deaths: list[Death] = []
        until: float | None = None
        gone: set[int] = set()
        with selectors.DefaultSelector() as watched:
            watched.register(self._woken, selectors.EVENT_READ)
            for rank, wire in self.wires.items():
                watched.register(wire.socket, selectors.EVENT_READ, (rank, wire))
            while not deaths or (until and time.monotonic() < until and len(deaths) + len(gone) < len(self.everyone)):
                for key, _ in watched.select(timeout=None if until is None else max(0.0, until - time.monotonic())):
                    if key.data is None:
                        self._woken.recv(1)
                        news = self._own
                    else:
                        rank, wire = key.data
                        news, finished = _news(rank, wire)
                        if finished or news:
                            watched.unregister(wire.socket)
                        if finished:
                            gone.add(rank)
                    if news:
                        deaths.append(news)
                        until = until or time.monotonic() + GATHER
                if self._leaving.is_set() and not deaths and len(gone) == len(self.wires):
                    return
        if self._leaving.is_set() and not any(death.text for death in deaths):
            return  # the run is over; who leaves without a bye then has nothing to lose
        text, code = verdict(deaths, self.everyone)
        silent = {present.rank for present in self.everyone} - gone - {death.rank for death in deaths} - {self.me.rank}
        if silent and all(death.caused for death in deaths):
            names = ", ".join(str(self.everyone[rank]) for rank in sorted(silent))
            text = f"not heard of, so perhaps stopped or stuck: {names}\n{text}"
        for wire in self.wires.values():
            wire.send(abort=text, code=code)
        if self._own and not self._own.caused:  # the main thread tells its own story
            others = [death for death in deaths if death.text != self._own.text and not death.caused]
            if others:
                self.tell(verdict(others, self.everyone)[0], True)
            self._over.set()
            return
        self._end(text, code, speaker=True)


def _news(rank: int, wire: Wire) -> tuple[Death | None, bool]:
    """What a rank's wire says: its death, or that it has left."""
    for message in wire.waiting():
        if message is None:
            return Death(rank), False
        if "bye" in message:
            return None, True
        if "died" in message:
            return Death(rank, str(message["died"]), int(message["code"]), bool(message["caused"])), False
    return None, False


class GuestLine(Line):
    """Another rank's: a wire to rank 0."""

    def __init__(self, me: Present, guest: Guest):
        super().__init__(me, guest.everyone)
        self.wire = guest.wire
        self._thread = threading.Thread(target=self._watch, name="hpclm-line", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Tell rank 0 that this rank is done."""
        self._leaving.set()
        self.wire.send(bye=0)

    def _forget(self) -> None:
        self.wire.socket.close()

    def die(self, text: str, code: int, caused: bool) -> None:
        """Give up; the watching thread ends the process when rank 0 answers."""
        self._leaving.set()
        self.wire.send(died=shortened(text), code=code, caused=caused)
        self._over.wait(VERDICT)

    def _watch(self) -> None:
        while True:
            message = self.wire.receive()
            if message is None:
                if self._leaving.is_set():
                    self._over.set()
                    return
                text, code = verdict([Death(0)], self.everyone)
                time.sleep(min(1.0, 0.1 * (self.me.rank - 1)))  # the first who is left tells; the others find it told
                self._end(text, code, speaker=True)
            if "bye" in message:
                self._leaving.set()
            if "abort" in message:
                self._end(str(message["abort"]), int(message["code"]), speaker=False)


def shortened(text: str) -> str:
    """``text``, or its beginning and end where it is very long."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}\n[...]\n{text[-half:]}"


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error only says that another process is gone."""
    words = (
        "connection closed by peer",
        "connection reset by peer",
        "broken pipe",
        "gloo",
        "nccl",
        "socket",
        "tcpstore",
    )
    kind = type(error).__name__
    return kind in ("DistBackendError", "DistNetworkError", "DistStoreError") or (
        isinstance(error, RuntimeError)
        and not isinstance(error, HpclmError)
        and any(word in str(error).lower() for word in words)
    )
