"""The roll call: every rank answers to rank 0 before anything collective begins.

Rank 0 listens; the others look for it, say who they are, and wait. Whoever contradicts the others (another number of
processes, a rank that has answered already) ends the start for all within seconds, with what was seen; whoever does
not answer is named. The connections stay open: cluster/ending.py hears over them who has died.

The name of the launch tells a run's own ranks from those of another run that meets the same port. Jobs of the shipped
templates and hpclm's own launcher make it random, so that only who sees the job's environment can answer. Beyond that, like
PyTorch's store, the ports of a run trust their network.
"""

import hashlib
import logging
import os
import selectors
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from hpclm import __version__
from hpclm.cluster import ports
from hpclm.cluster.bootstrap import World
from hpclm.cluster.wire import Wire
from hpclm.errors import ConfigError, HpclmError

log = logging.getLogger(__name__)

REMIND = 15.0  # seconds between lines that say who is missing
PATIENCE = 0.7  # seconds, at first, for an answer behind a door: somebody else's server may say nothing
LINGER = 3.0  # seconds in which latecomers hear why a start was refused


@dataclass(frozen=True)
class Present:
    """One rank's answer."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    version: str = __version__

    @classmethod
    def of(cls, world: World) -> "Present":
        """This process's."""
        return cls(world.rank, world.size, world.local_rank, world.local_size)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Host:
    """Rank 0's end of the roll call: everyone, and a wire to each other rank."""

    everyone: tuple[Present, ...]
    wires: dict[int, Wire]

    def begin(self, **news: Any) -> None:
        """Let the others go on, with ``news``."""
        for wire in self.wires.values():
            wire.send(begin=news, everyone=[asdict(present) for present in self.everyone])


@dataclass(frozen=True)
class Guest:
    """Another rank's end."""

    everyone: tuple[Present, ...]
    wire: Wire
    news: dict[str, Any]


def sign(launch: str) -> str:
    """What the ranks of a launch know each other by."""
    return hashlib.blake2b(launch.encode(), digest_size=16).hexdigest()


def call(world: World, listener: socket.socket, launch: str, seconds: float) -> Host:
    """Rank 0: wait until every rank has answered on ``listener``.

    ConfigError when ranks contradict each other, HpclmError when some do not answer within ``seconds``.
    """
    hall = _Hall(world, launch)
    began = reminded = time.monotonic()
    with selectors.DefaultSelector() as watched:
        watched.register(listener, selectors.EVENT_READ)
        while missing := hall.missing():
            for key, _ in watched.select(timeout=1.0):
                if key.fileobj is listener:
                    wire = Wire(ports.alive(listener.accept()[0]))
                    watched.register(wire.socket, selectors.EVENT_READ, wire)
                    continue
                try:
                    staying = hall.hear(key.data)
                except ConfigError as error:
                    raise _refused(error, [*hall.wires.values(), key.data], listener, launch) from None
                if not staying:
                    watched.unregister(key.fileobj)
                    key.data.close()
            now = time.monotonic()
            if now - began > seconds:
                text = (
                    f"{len(missing)} of {world.size} processes did not answer within {seconds:g} s: rank{_plural(missing)} "
                    f"{ranges(missing)}; those that did are on {', '.join(hall.hosts())}. Look at their output and nodes, "
                    f"or give them longer with cluster.start_seconds"
                )
                raise _refused(HpclmError(text), list(hall.wires.values()), listener, launch)
            if now - reminded > REMIND:
                log.warning("waiting for rank%s %s", _plural(missing), ranges(missing))
                reminded = now
    listener.close()
    return Host(tuple(hall.seen[rank] for rank in range(world.size)), hall.wires)


class _Hall:
    """Who has answered, and over which wire. Strangers may be there too, and say what they like, or nothing."""

    def __init__(self, world: World, launch: str):
        self.world, self.launch = world, launch
        self.seen = {world.rank: Present.of(world)}
        self.wires: dict[int, Wire] = {}

    def missing(self) -> list[int]:
        """Ranks that have not answered, or have gone again."""
        if len(self.seen) == self.world.size:
            for rank in [rank for rank, wire in self.wires.items() if wire.over()]:
                del self.seen[rank], self.wires[rank]
        return [rank for rank in range(self.world.size) if rank not in self.seen]

    def hosts(self) -> list[str]:
        """Where those are that have."""
        return sorted({present.host for present in self.seen.values()})

    def hear(self, wire: Wire) -> bool:
        """Read what has come over ``wire``; whether to go on listening to it. ConfigError for a contradiction."""
        for message in wire.waiting():
            new = message and _present(message, self.launch)
            if not new:
                for rank in [rank for rank, own in self.wires.items() if own is wire]:
                    del self.seen[rank], self.wires[rank]  # it has gone again
                return False
            known = self.seen.get(new.rank)
            if known and (known.host, known.pid) == (new.host, new.pid) and new.rank in self.wires:
                self.wires[new.rank] = wire  # it was tired of waiting, and has called again
            elif wrong := _contradiction(new, self.world, self.seen):
                raise ConfigError(wrong)
            self.seen[new.rank], self.wires[new.rank] = new, wire
            wire.send(seen=sign(self.launch))
        return True


def answer(world: World, doors: list[tuple[str, int]], launch: str, seconds: float) -> Guest:
    """Another rank: find rank 0 behind one of ``doors`` (host, port), answer, and wait for the others.

    ConfigError when ranks contradict each other, HpclmError when rank 0 is not found within ``seconds``.
    """
    until, patience = time.monotonic() + seconds, PATIENCE
    while time.monotonic() < until:
        for host, port in doors:
            connection = ports.connect(host, port, seconds=2.0)
            if connection is None:
                continue
            wire = Wire(connection)
            wire.send(hpclm=sign(launch), **asdict(Present.of(world)))
            reply = wire.receive(patience)
            if reply and "refuse" in reply and reply.get("to") == sign(launch):
                raise _refusal(reply)
            if reply and reply.get("seen") == sign(launch):
                return _wait(wire, until + LINGER)
            wire.close()  # somebody else's port
        time.sleep(0.1)
        patience = min(2 * patience, 8 * PATIENCE)  # or rank 0 is slow to answer
    where = ", ".join(sorted({host for host, _ in doors}))
    raise HpclmError(
        f"rank {world.rank} on {socket.gethostname()} found no rank 0 on {where} within {seconds:g} s; look at rank 0's "
        f"output, whether {where} can be reached from here, and cluster.start_seconds"
    )


def _wait(wire: Wire, until: float) -> Guest:
    message = wire.receive(max(1.0, until - time.monotonic()))
    if message is None:
        raise HpclmError("rank 0 went away during the roll call; its output says why")
    if "refuse" in message:
        raise _refusal(message)
    return Guest(tuple(Present(**each) for each in message["everyone"]), wire, message["begin"])


def _present(message: dict[str, Any], launch: str) -> Present | None:
    """Who says ``message``; None for whoever is not of this launch."""
    if message.pop("hpclm", None) != sign(launch):
        return None
    try:
        return Present(**message)
    except TypeError:
        return None


def _contradiction(new: Present, world: World, seen: dict[int, Present]) -> str | None:
    first = seen[world.rank]
    if new.size != world.size:
        return f"the processes disagree: {first} is one of {world.size}, {new} one of {new.size}; start them together"
    if new.rank in seen:
        return f"two processes are rank {new.rank}: {seen[new.rank]}, and {new}; start each rank once"
    if new.version != first.version:
        return f"{first} runs hpclm {first.version}, {new} {new.version}; use one installation on all nodes"
    return None


def _refusal(message: dict[str, Any]) -> HpclmError:
    """The error that a refusal stands for."""
    kind = ConfigError if message.get("settings") else HpclmError
    return kind(str(message["refuse"]))


def _refused(error: HpclmError, wires: list[Wire], listener: socket.socket, launch: str) -> HpclmError:
    """``error``, once everyone who is there has been told of it, and for a moment those who come late."""
    told = {"refuse": str(error), "to": sign(launch), "settings": isinstance(error, ConfigError)}
    for wire in wires:
        wire.send(**told)
    until = time.monotonic() + LINGER
    while (left := until - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            late = Wire(listener.accept()[0])
        except OSError:
            break
        late.send(**told)
        wires.append(late)
    for wire in wires:
        wire.close()
    listener.close()
    return error


def _plural(ranks: list[int]) -> str:
    return "s" * (len(ranks) != 1)


def ranges(numbers: list[int]) -> str:
    """[1, 3, 4, 5] -> ``1, 3-5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
