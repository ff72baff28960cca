"""Where rank 0 is to be found, launcher by launcher.

Slurm and hpclm's own launcher say on which host, and the ports follow from the name of the launch; under MPI rank 0
broadcasts them, and under torchrun its store holds them.
"""

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hpclm.cluster import interfaces, ports, rollcall
from hpclm.cluster.bootstrap import OF_MPI, World
from hpclm.cluster.rollcall import Guest, Host
from hpclm.config import ClusterConfig
from hpclm.errors import ConfigError

Door = tuple[str, int]
KEY = "hpclm/door"


Store = Callable[[int, int, timedelta], Any]
"""Rank, size and time limit -> the key-value store that PyTorch's process group meets through."""


@dataclass(frozen=True)
class Met:
    """What a roll call leaves: this process's end of it, the store, and the interface that reaches the others."""

    end: Host | Guest
    store: Store
    interface: str | None


def meet(world: World, settings: ClusterConfig) -> Met:
    """Hold the roll call of ``world`` (of more than one process); see rollcall for what it refuses."""
    seconds = settings.start_seconds
    if world.launcher == "torchrun":
        agents = _agent_store(world)
        if world.rank == 0:
            door, doors = _open()
            agents.set(KEY, "\n".join(f"{host} {port}" for host, port in doors))
            return _host(world, door, world.launch, seconds, agents)
        doors = [_door(line) for line in agents.get(KEY).decode().splitlines()]
        return _guest(world, doors, world.launch, seconds, agents)
    if world.launcher in OF_MPI:
        listener, doors, launch = _by_mpi(world)
        return _host(world, listener, launch, seconds) if listener else _guest(world, doors, launch, seconds)
    candidates = ports.candidates(world.launch)
    if world.rank == 0:
        return _host(world, ports.listen(candidates), world.launch, seconds)
    host = "127.0.0.1" if world.first_host == socket.gethostname() else world.first_host
    return _guest(world, [(host, port) for port in candidates], world.launch, seconds)


def _host(world: World, listener: socket.socket, launch: str, seconds: float, agents: Any = None) -> Met:
    end = rollcall.call(world, listener, launch, seconds)
    outside = [wire for rank, wire in end.wires.items() if end.everyone[rank].host != end.everyone[0].host]
    ours = interfaces.of(outside[0].socket.getsockname()[0]) if outside else "lo"
    held = None if agents else ports.listen(ports.candidates(secrets.token_hex(8)))  # bound, and so nobody else's
    port = held.getsockname()[1] if held else 0
    end.begin(port=port, interface=ours)

    def store(rank: int, size: int, limit: timedelta) -> Any:
        import torch.distributed as dist

        if held is None:
            return agents
        make = dist.TCPStore  # type: ignore[attr-defined]
        return make("127.0.0.1", port, size, True, limit, wait_for_workers=False, master_listen_fd=held.detach())

    return Met(end, store, ours)


def _guest(world: World, doors: list[Door], launch: str, seconds: float, agents: Any = None) -> Met:
    end = rollcall.answer(world, doors, launch, seconds)
    first, me = end.everyone[0], end.everyone[world.rank]
    own = end.news["interface"] if me.host == first.host else interfaces.of(end.wire.socket.getsockname()[0])
    host = end.wire.socket.getpeername()[0]

    def store(rank: int, size: int, limit: timedelta) -> Any:
        import torch.distributed as dist

        return agents or dist.TCPStore(host, end.news["port"], size, False, limit)  # type: ignore[attr-defined]

    return Met(end, store, own)


def _open() -> tuple[socket.socket, list[Door]]:
    """A listening socket, and every address that leads to it."""
    listener = ports.listen(ports.candidates(secrets.token_hex(8)))
    port = listener.getsockname()[1]
    own = [address for address in interfaces.addresses().values() if not address.startswith("127.")]
    return listener, [(host, port) for host in (*own, socket.gethostname(), "127.0.0.1")]


def _door(line: str) -> Door:
    host, _, port = line.rpartition(" ")
    return host, int(port)


def _agent_store(world: World) -> Any:
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timedelta(minutes=10)))
    return store


def _by_mpi(world: World) -> tuple[socket.socket | None, list[Door], str]:
    """Rank 0's doors and the name of the launch, which MPI brings to every rank."""
    try:
        from mpi4py import MPI  # importing it initialises MPI: only ever under an MPI launcher
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{world.launcher} started this process, but mpi4py cannot load its library: {error}. The MPI whose "
            f"mpirun you use must be found by the loader (LD_LIBRARY_PATH, a module), or started by another launcher"
        ) from None
    everyone = MPI.COMM_WORLD
    if (everyone.rank, everyone.size) != (world.rank, world.size):
        library = MPI.Get_library_version().split(",")[0].strip()
        raise ConfigError(
            f"{world.launcher} says rank {world.rank} of {world.size}, but MPI itself ({library}) rank {everyone.rank} of "
            f"{everyone.size}: mpirun and the library that mpi4py loads are of different MPIs, or the variables of another "
            f"launch have leaked in (look at env | grep -E 'OMPI|PMI')"
        )
    listener, doors = _open() if world.rank == 0 else (None, [])
    doors, launch = everyone.bcast((doors, secrets.token_hex(8)) if world.rank == 0 else None)
    return listener, doors, launch
