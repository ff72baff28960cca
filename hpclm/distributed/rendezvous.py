"""The rendezvous of a run's ranks: they connect to one key-value store, PyTorch's TCPStore.

torchrun's agent already has one. Under MPI, rank 0 opens it and broadcasts its address. Under Slurm, the host of rank 0
is known, and the port follows from job, step and restart; a client recognises the right server by a signed key. Every rank
registers in the store, and rank 0 either starts the run or refuses it, with the reason.
"""

import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpclm import __version__, extras, files
from hpclm.config import ClusterConfig
from hpclm.distributed import network
from hpclm.distributed.bootstrap import OF_MPI, World
from hpclm.distributed.signed import SignedStore
from hpclm.errors import ConfigError, HpclmError
from hpclm.node.processes import wait_until

if TYPE_CHECKING:
    from torch.distributed import Store

Endpoint = tuple[str, int]
"""Host and port."""
SERVER, ARRIVED, RANKS = "hpclm/server", "hpclm/arrived", "hpclm/ranks"
PATIENCE = 1.0  # seconds for a server to answer before the next port is tried; a later answer still counts
SEARCH = 0.1  # seconds between two searches for the server
CROWD = 128  # with more clients, each asks less often
LINGER = 2.0  # seconds that rank 0 stays, so that others can read why the run is refused
POLL = 0.05


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank, as the others know it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = 0
    version: str = __version__
    address: str = ""
    """Its IPv4 address on the route to rank 0."""
    machine: str = ""
    """Where PIDs are unique: a host, and the container on it."""

    @classmethod
    def of(cls, world: World, address: str = "") -> "RankInfo":
        """This process."""
        numbers = (world.rank, world.size, world.local_rank, world.local_size)
        return cls(*numbers, pid=os.getpid(), address=address, machine=files.here())

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Rendezvous:
    """What a rank knows after the rendezvous."""

    store: SignedStore
    ranks: tuple[RankInfo, ...]
    interface: str | None
    """The interface that leads to the other nodes; lo when there are none."""


def connect(world: World, settings: ClusterConfig) -> Rendezvous:
    """Connect to the other ranks of ``world``. Called by every rank, when there are several.

    ConfigError if the ranks contradict each other, HpclmError if some have not arrived within
    ``cluster.start_seconds``; both name them.
    """
    store, host = _store(world, settings)
    address = network.address_towards(host) if host else network.own_address(socket.gethostname())
    ranks = _register(store, RankInfo.of(world, address), world, settings.start_seconds)
    others = [info for info in ranks if info.host != ranks[world.rank].host]
    if not others:
        return Rendezvous(store, ranks, "lo")
    return Rendezvous(store, ranks, network.interface_of(network.address_towards(host or others[0].address)))


def serve(listener: socket.socket, world: World) -> SignedStore:
    """Rank 0's store on the socket ``listener``, which it takes over, so that no other process can take the port in between."""
    from torch.distributed import TCPStore

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # two connections for each rank
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, port = listener.getsockname()[:2]
    own, limit = "127.0.0.1" if host == "0.0.0.0" else host, timedelta(seconds=60)
    server = TCPStore(own, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())
    store = SignedStore(server, world.run_id, world.secret)
    store.set(SERVER, True)
    return store


def find(endpoints: Sequence[Endpoint], world: World, seconds: float) -> tuple[SignedStore, str]:
    """Rank 0's store at one of ``endpoints``, and its host; HpclmError when it is not found within ``seconds``."""
    until, attempts = time.monotonic() + seconds, dict[Endpoint, _Attempt]()
    while time.monotonic() < until:
        addresses = {host: network.resolved(host) for host, _ in endpoints}  # one question, not one for each port
        for host, port in endpoints:
            endpoint = addresses[host], port
            attempt = attempts.get(endpoint)
            if attempt is None or not (attempt.is_alive() or attempt.store):
                if not network.answers(*endpoint, seconds=2.0):
                    continue
                attempt = attempts[endpoint] = _Attempt(endpoint, world)
                attempt.start()
            attempt.join(PATIENCE)
            if attempt.store is not None:
                return attempt.store, endpoint[0]
        time.sleep(_pause(SEARCH, world.size))
    raise _unreachable(world, ", ".join(sorted({host for host, _ in endpoints})), seconds)


class _Attempt(threading.Thread):
    """An attempt to connect, in a thread: PyTorch's client waits forever for a server that accepts and never answers."""

    def __init__(self, endpoint: Endpoint, world: World):
        super().__init__(name=f"hpclm-connect-{endpoint[1]}", daemon=True)
        self.endpoint, self.world = endpoint, world
        self.store: SignedStore | None = None

    def run(self) -> None:
        from torch.distributed import TCPStore

        with suppress(RuntimeError):
            server = TCPStore(*self.endpoint, None, False, timedelta(seconds=30), wait_for_workers=False)
            store = SignedStore(server, self.world.run_id, self.world.secret)
            if store.opened(SERVER, server.get(SERVER)):  # otherwise it is another run's
                self.store = store


def _unreachable(world: World, host: str, seconds: float, why: str = "") -> HpclmError:
    return HpclmError(
        f"rank {world.rank} on {socket.gethostname()} could not reach rank 0 at {host} within {seconds:g} s{why}; look at rank 0's "
        f"output, check that {host} can be reached from here, or raise cluster.start_seconds"
    )


def _pause(least: float, clients: int) -> float:
    """Seconds between two questions of one of ``clients``, of which all together ask no more often than CROWD would."""
    return least * max(1.0, clients / CROWD)


def _store(world: World, settings: ClusterConfig) -> tuple[SignedStore, str]:
    """The run's store, and its host if that is another rank's."""
    if world.launcher in ("torchrun", "local"):
        return SignedStore(_of_torchrun(world, settings), world.run_id, world.secret), world.master
    one_host = world.local_size == world.size
    if world.launcher in OF_MPI:
        listener, endpoints, world = _by_mpi(world, settings, one_host)
    else:
        ports, first = network.candidates(world.run_id), "127.0.0.1" if one_host else world.first_host
        address = "127.0.0.1" if one_host else _bind_address(settings, world.first_host)
        listener = network.listen(ports, address) if world.rank == 0 else None
        endpoints = [(first, port) for port in ports]
    return (serve(listener, world), "") if listener is not None else find(endpoints, world, settings.start_seconds)


def _of_torchrun(world: World, settings: ClusterConfig, env: Mapping[str, str] = os.environ) -> "Store":
    """The store that torchrun names: its agent's, or rank 0's."""
    from torch.distributed import DistNetworkError, PrefixStore, TCPStore

    serves = world.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port, limit = int(env["MASTER_PORT"]), timedelta(seconds=settings.start_seconds)
    try:
        store = TCPStore(world.master, port, None, serves, limit, wait_for_workers=False)
    except DistNetworkError as error:
        why = f" ({str(error).splitlines()[0]})"
        raise _unreachable(world, f"{world.master}:{port}", settings.start_seconds, why) from None
    store.set_timeout(timedelta(minutes=10))
    return PrefixStore(world.run_id, store)


def _bind_address(settings: ClusterConfig, name: str) -> str:
    """The address that rank 0 listens on: of the chosen interface, else of its host ``name``, else any."""
    return network.addresses().get(settings.interface, "") if settings.interface else network.own_address(name)


def _by_mpi(
    world: World, settings: ClusterConfig, one_host: bool
) -> tuple[socket.socket | None, list[Endpoint], World]:
    """Rank 0's socket, its endpoints, and the world with a secret; MPI broadcasts both."""
    try:
        with extras.needed_for(f"{world.launcher}, which started this process,"):
            from mpi4py import MPI  # importing it initialises MPI: only ever under an MPI launcher
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{world.launcher} started this process, but mpi4py cannot load its library: {error}. Make the MPI whose "
            "mpirun you use visible to the loader (LD_LIBRARY_PATH, a module), or use another launcher"
        ) from None
    comm = MPI.COMM_WORLD
    if (comm.rank, comm.size) != (world.rank, world.size):
        library = MPI.Get_library_version().split(",")[0].strip()
        raise ConfigError(
            f"{world.launcher} says rank {world.rank} of {world.size}, but MPI itself ({library}) rank {comm.rank} of "
            f"{comm.size}: mpirun and the library that mpi4py loads belong to different MPIs, or the variables of another "
            "launch have leaked in (check env | grep -E 'OMPI|PMI')"
        )
    listener, endpoints, secret = None, list[Endpoint](), secrets.token_hex(16)
    if world.rank == 0:
        address = "127.0.0.1" if one_host else _bind_address(settings, "") if settings.interface else ""
        listener = network.listen(network.candidates(secret), address)
        own = [interface for interface in network.addresses().values() if not interface.startswith("127.")]
        hosts = [address] if address else [*own, socket.gethostname()]
        endpoints = [(host, listener.getsockname()[1]) for host in hosts]
    endpoints, secret = comm.bcast((endpoints, secret) if world.rank == 0 else None)
    return listener, endpoints, replace(world, secret=secret)


def _register(store: SignedStore, me: RankInfo, world: World, seconds: float) -> tuple[RankInfo, ...]:
    """Register this rank, and wait until rank 0 lists all ranks, or refuses the run."""
    first = _info(store.put(_rank(me.rank), asdict(me)))
    if first != me:
        _refuse(store, ConfigError(f"two processes are rank {me.rank}: {first} and {me}; start each rank once"))
    store.raw.add(ARRIVED, 1)
    if me.rank == 0:
        _decide(store, me, world, seconds)
    answer = store.wait(RANKS, seconds + LINGER, _pause(POLL, me.size))
    if answer is None:
        raise HpclmError(f"{me} got no answer from rank 0 within {seconds:g} s; see its output")
    if "refused" in answer:
        if me.rank == 0:
            time.sleep(LINGER)  # the store ends with this process
        raise (ConfigError if answer["settings"] else HpclmError)(answer["refused"])
    ranks = roster(answer)
    if len(ranks) != me.size:
        raise ConfigError(f"the processes disagree: {ranks[0]} is one of {len(ranks)}, {me} one of {me.size}")
    return ranks


def _decide(store: SignedStore, me: RankInfo, world: World, seconds: float) -> None:
    """On rank 0: wait for all ranks, then start or refuse the run."""
    keys = [*map(_rank, range(me.size))]
    entries: list[Any] = []

    def decided() -> bool:  # the counter, which is not signed, only saves questions
        if store.raw.add(ARRIVED, 0) >= me.size:
            entries[:] = store.get_all(keys) or []
        return bool(entries and None not in entries) or store.get(RANKS) is not None

    wait_until(decided, seconds, POLL / 5)
    entries = entries or [*map(store.get, keys)]
    missing = [rank for rank, entry in enumerate(entries) if entry is None]
    if missing:
        hosts = [f" ({host})" if (host := world.host_of(rank)) else "" for rank in missing]
        named = ", ".join(f"rank {rank}{host}" for rank, host in zip(missing[:16], hosts, strict=False))
        more = f" and {len(missing) - 16} more" * (len(missing) > 16)
        text = f"{len(missing)} of {me.size} processes did not arrive within {seconds:g} s: {named}{more}; "
        _refuse(store, HpclmError(f"{text}look at their output, or raise cluster.start_seconds"))
        return
    ranks = [*map(_info, entries)]
    for info in ranks:
        if info.size != me.size:
            text = f"the processes disagree: {me} is one of {me.size}, {info} one of {info.size}; start them together"
        elif info.version != me.version:
            text = f"{me} runs hpclm {me.version}, {info} {info.version}; use one installation on all nodes"
        else:
            continue
        return _refuse(store, ConfigError(text))
    store.put(RANKS, {"ranks": [astuple(info) for info in ranks]})


def roster(answer: Mapping[str, Any]) -> tuple[RankInfo, ...]:
    """All ranks, of rank 0's answer."""
    return tuple(RankInfo(*values) for values in answer["ranks"])


def _refuse(store: SignedStore, error: HpclmError) -> None:
    """Publish that the run is refused; the first decision counts."""
    store.put(RANKS, {"refused": str(error), "settings": isinstance(error, ConfigError)})


def _rank(rank: int) -> str:
    """The key under which a rank registers."""
    return f"hpclm/rank/{rank}"


def _info(value: Any) -> RankInfo:
    try:
        return RankInfo(**value)
    except TypeError:  # without a secret
        raise HpclmError(f"the store of this run contains {value!r:.200}, which hpclm did not write") from None
