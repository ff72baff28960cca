"""How a run of several processes ends when one of them dies: all are gone within seconds, and the first cause is told.

Each rank keeps the connection of the roll call. A rank that fails sends its traceback; one that is killed cannot, but its
connection breaks. Rank 0 gathers such news for a moment, since the others fail too as soon as they miss a peer, tells the
first cause, and then every process kills its children and leaves. When it is rank 0 that dies, the others see it at once.

Over the same connections the ranks say how far they are, and tell where they are when nothing moves (watchdog.py).
"""

import selectors
import socket
import threading
import time
from typing import Any, NoReturn

from hpclm.cluster.cause import Death, shortened, verdict
from hpclm.cluster.line import Line
from hpclm.cluster.rollcall import Guest, Host, Present
from hpclm.cluster.wire import Wire

VERDICT = 5.0  # seconds that a failing rank waits to be told the cause
GATHER = 1.0  # seconds in which later failures count as caused by the first
SOON = 8.0  # seconds after which a rank that has told where it is in a hung run ends by itself


class HostLine(Line):
    """Rank 0's: hears everyone, tells everyone."""

    def __init__(self, me: Present, host: Host):
        super().__init__(me, host.everyone)
        self.wires = dict(host.wires)
        self._own: Death | None = None
        self._stands: dict[int, dict[str, Any]] = {}
        self._told = threading.Condition()
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

    @property
    def sockets(self) -> list[socket.socket]:
        """One to each other rank."""
        return [wire.socket for wire in self.wires.values()]

    def beat(self, **word: Any) -> None:
        """Say to all how far rank 0 is."""
        for wire in self.wires.values():
            wire.post(beat=word)

    def ask(
        self, code: int, folder: str | None, silent: set[int], seconds: float, longer: float
    ) -> tuple[dict[int, Any], set[int]]:
        """Where every other rank is, of those that answer, and who did not within ``seconds``; ``silent`` ones are given none.

        Those have ``longer``: rank 0 hangs up on them, so that their guardians wake what is stopped. All write their
        stacks into ``folder``, and then end with ``code`` when they are told.
        """
        for wire in self.wires.values():
            wire.post(hang={"code": code, "folder": folder})
        with self._told:
            self._told.wait_for(lambda: len(self._stands.keys() | silent) >= len(self.wires), seconds)
            mute = set(self.wires) - set(self._stands)
        for rank in mute:
            self.wires[rank].finish()
        with self._told:
            self._told.wait_for(lambda: len(self._stands) == len(self.wires), longer if mute else 0)
            return dict(self._stands), mute

    def finish(self, text: str, code: int) -> NoReturn:
        """End all, of ``text``."""
        for wire in self.wires.values():
            wire.post(abort=text, code=code)
        self.end(text, code, speaker=True)

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
                        news, finished = self._news(rank, wire)
                        if finished or news:
                            watched.unregister(wire.socket)
                        if finished:
                            gone.add(rank)
                    if news and not self._ending.locked():
                        deaths.append(news)
                        until = until or time.monotonic() + GATHER
                if self._leaving.is_set() and not deaths and len(gone) == len(self.wires):
                    return
        if self._leaving.is_set() and not any(death.text for death in deaths):
            return  # the run is over; who leaves without a bye then has nothing to lose
        if not self.ends():
            return
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
        self.end(text, code, speaker=True)

    def _news(self, rank: int, wire: Wire) -> tuple[Death | None, bool]:
        """What a rank's wire says: its death, or that it has left."""
        for message in wire.waiting():
            if message is None:
                return (None, True) if rank in self._stands else (Death(rank, code=self.lost), False)
            if "bye" in message:
                return None, True
            if "died" in message:
                return Death(rank, str(message["died"]), int(message["code"]), bool(message["caused"])), False
            if "beat" in message:
                self.heard[rank] = message["beat"]
            if found := message.get("stand") or message.get("hang", {}).get("stand"):
                with self._told:
                    self._stands[rank] = found
                    self._told.notify()
            if "hang" in message and self.ends():  # it found that this process does not answer
                words = (message["hang"],)
                threading.Thread(target=self.accused, args=words, name="hpclm-end", daemon=True).start()
        return None, False


class GuestLine(Line):
    """Another rank's: a wire to rank 0."""

    def __init__(self, me: Present, guest: Guest):
        super().__init__(me, guest.everyone)
        self.wire = guest.wire
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hpclm-line", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Tell rank 0 that this rank is done."""
        self._leaving.set()
        self.wire.send(bye=0)

    def _forget(self) -> None:
        self.wire.socket.close()

    @property
    def sockets(self) -> list[socket.socket]:
        """The one to rank 0."""
        return [self.wire.socket]

    def beat(self, **word: Any) -> None:
        """Say to rank 0 how far this rank is."""
        self.wire.post(beat=word)

    def accuse(self, order: dict[str, Any], seconds: float) -> None:
        """Give up on rank 0: tell it so, and hang up, so that its guardian wakes it if it is stopped.

        Woken, it ends the run; this returns where it does not answer within ``seconds``.
        """
        self.wire.post(hang=order)
        self.wire.finish()
        if self._answered.wait(seconds):
            time.sleep(SOON)  # the watching thread ends this process

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
                if not self.ends():
                    return
                text, code = verdict([Death(0, code=self.lost)], self.everyone)
                time.sleep(min(1.0, 0.1 * (self.me.rank - 1)))  # the first who is left tells; the others find it told
                self.end(text, code, speaker=True)
            if "beat" in message:
                self.heard[0] = message["beat"]
            if "bye" in message:
                self._leaving.set()
            if "hang" in message and not self.ends():
                self._answered.set()  # this rank has given up on rank 0, which lives after all
            elif "hang" in message:
                order = message["hang"]
                self.wire.send(stand=self.stand(**order))
                last = self.wire.receive(SOON)
                if last is None:  # rank 0 has hung up on this rank, which was stopped; all leave together
                    time.sleep(1.0)
                self.end(str((last or {}).get("abort", "")), int(order["code"]), speaker=False)
            if "abort" in message:
                self.ends()
                self.end(str(message["abort"]), int(message["code"]), speaker=False)
