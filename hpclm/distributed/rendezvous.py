"""The rendezvous of a run's ranks: they connect to one key-value store, PyTorch's TCPStore.

torchrun's agent already has one. Otherwise rank 0 opens it on all interfaces, and the others try all addresses of its node:
MPI broadcasts them; under Slurm the job's script exports them, and the port follows from job, step and restart. A client recognises
the right server by the name of the start. Every rank registers in the store, and rank 0 either starts the run or refuses it, with the reason.
"""

import itertools
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from hpclm import __version__, extras, files
from hpclm.config import ClusterConfig
from hpclm.distributed import network
from hpclm.distributed.bootstrap import OF_MPI, World
from hpclm.distributed.store import JsonStore
from hpclm.errors import ConfigError, HpclmError
from hpclm.node.processes import wait_until

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)
SERVER, RANKS = "hpclm/server", "hpclm/ranks"
LOOPBACK = "127.0.0.1"
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
    """Where its PID means the same (``files.here``): a machine, or a container on it."""
    networks: str = ""
    """All IPv4 addresses of its machine but loopback's: a machine that was cloned while it ran keeps even the ID of its boot."""

    @classmethod
    def of(cls, world: World, address: str = "") -> "RankInfo":
        """This process."""
        numbers = (world.rank, world.size, world.local_rank, world.local_size)
        networks = " ".join(sorted(ipv4 for ipv4 in network.addresses().values() if not ipv4.startswith("127.")))
        return cls(*numbers, pid=os.getpid(), address=address, machine=files.here(), networks=networks)

    @property
    def node(self) -> tuple[str, str, str]:
        """The machine, as far as networks are concerned: ranks with the same one share a loopback interface."""
        return self.host, files.network_of(self.machine), self.networks

    @property
    def process_table(self) -> tuple[str, str]:
        """Ranks with the same one can look up, and signal, one another by PID."""
        return self.machine, self.networks

    def neighbours(self, ranks: Sequence["RankInfo"]) -> list["RankInfo"]:
        """The other ranks of its machine."""
        return [info for info in ranks if info.process_table == self.process_table and info.rank != self.rank]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Rendezvous:
    """What a rank knows after the rendezvous."""

    store: JsonStore
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
    others = [info for info in ranks if info.node != ranks[world.rank].node]
    nodes = [info.node for info in ranks]
    if not world.rank and len([*itertools.groupby(nodes)]) > len(set(nodes)):
        log.warning(
            "neighbouring ranks are on different nodes, which slows tensor parallelism: leave srun's --distribution out"
        )
    if not others:
        return Rendezvous(store, ranks, "lo")
    return Rendezvous(store, ranks, network.interface_of(network.address_towards(host or others[0].address)))


def serve(listener: socket.socket, world: World) -> JsonStore:
    """Rank 0's store on the socket ``listener``, which it takes over, so that no other process can take the port in between."""
    from torch.distributed import TCPStore

    port, limit = listener.getsockname()[1], timedelta(seconds=60)
    # it need not wait: _decide counts the ranks, and can name those that are missing
    server = TCPStore(LOOPBACK, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())
    store = JsonStore(server)
    store.set(SERVER, world.run_id)
    return store


def find(hosts: Sequence[str], ports: Sequence[int], world: World, seconds: float) -> tuple[JsonStore, str]:
    """Rank 0's store on one of ``hosts``, and its address; HpclmError if it is not there within ``seconds``."""
    until, calls = time.monotonic() + seconds, dict[tuple[str, int], network.StoreCall | None]()
    while time.monotonic() < until:
        # again: a node that has just booted may get its names later
        addresses = {host: network.resolved(host) for host in hosts}
        silent = {""}
        for port, address in itertools.product(ports, dict.fromkeys(addresses.values())):
            call = calls.get((address, port))
            if address not in silent and (call is None or not (call.is_alive() or call.answer)):
                # PyTorch's client would try again until its own time limit, on every port that is not the right one
                answer = network.answers(address, port, seconds=2.0)
                if answer is None:
                    silent.add(address)
                call = calls[address, port] = (
                    network.StoreCall(partial(_client, address, port, world)) if answer else None
                )
            if call and (store := call.result(PATIENCE)):
                return store, address
        time.sleep(_pause(SEARCH, world.size))
    unknown = [host for host, address in addresses.items() if not address]
    raise _unreachable(
        world, hosts, seconds, f" ({', '.join(unknown)}: no IPv4 address is known here)" if unknown else ""
    )


def _client(address: str, port: int, world: World) -> JsonStore | None:
    """The store at an address, if it is the one of this launch."""
    from torch.distributed import TCPStore

    server = TCPStore(address, port, None, False, timedelta(seconds=30), wait_for_workers=False)
    return JsonStore(server) if server.get(SERVER) == json.dumps(world.run_id).encode() else None


def check_ipv4(world: World) -> None:
    """ConfigError where ranks on several machines would meet over IPv4, and this one has none."""
    if world.local_size < world.size and network.without_ipv4():
        raise ConfigError(
            f"{socket.gethostname()} has no IPv4 address but loopback's, and ranks that {world.launcher} starts meet over IPv4: "
            "start them with torchrun (job.template=torchrun), which also uses IPv6, or give the nodes IPv4 addresses"
        )


def _unreachable(world: World, hosts: Sequence[str], seconds: float, why: str = "") -> HpclmError:
    host = ", ".join(hosts)
    return HpclmError(
        f"rank {world.rank} on {socket.gethostname()} could not reach rank 0 at {host} within {seconds:g} s{why}; look at rank 0's "
        f"output, check that {host} can be reached from here, or raise cluster.start_seconds"
    )


def _pause(seconds: float, clients: int) -> float:
    """Seconds between two questions of one of ``clients``, of which all together ask no more often than CROWD would."""
    return seconds * max(1.0, clients / CROWD)


def _store(world: World, settings: ClusterConfig) -> tuple[JsonStore, str]:
    """The run's store, and its host if that is another rank's."""
    if world.launcher in ("torchrun", "local"):
        return JsonStore(_of_torchrun(world, settings)), world.masters[0]
    check_ipv4(world)
    comm = _mpi(world) if world.launcher in OF_MPI else None
    if comm:
        world = replace(world, run_id=secrets.token_hex(16))  # rank 0's counts
    several, listener = world.local_size < world.size, None
    hosts, ports = list(world.masters) if several else [LOOPBACK], network.candidates(world.run_id)
    if world.rank == 0:
        listener = network.listen(ports, "" if several else LOOPBACK)
    if comm:
        if listener:
            hosts = network.own_addresses(settings.interface) if several else hosts
            ports = [listener.getsockname()[1]]
        hosts, ports, run_id = comm.bcast((hosts, ports, world.run_id))
        world = replace(world, run_id=run_id)
    return (serve(listener, world), "") if listener else find(hosts, ports, world, settings.start_seconds)


def _of_torchrun(world: World, settings: ClusterConfig, env: Mapping[str, str] = os.environ) -> "Store":
    """The store that torchrun names: its agent's, or rank 0's."""
    from torch.distributed import DistNetworkError, PrefixStore, TCPStore

    serves = world.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port, limit = int(env["MASTER_PORT"]), timedelta(seconds=settings.start_seconds)
    try:
        store = TCPStore(world.masters[0], port, None, serves, limit, wait_for_workers=False)
    except DistNetworkError as error:
        why = f" ({str(error).splitlines()[0]})"
        raise _unreachable(world, [f"{world.masters[0]}:{port}"], settings.start_seconds, why) from None
    store.set_timeout(timedelta(minutes=10))
    # torchrun's agent keeps its store over restarts: what the attempt before wrote must not count
    return PrefixStore(world.run_id, store)


def _mpi(world: World) -> Any:
    """MPI's communicator of all ranks; ConfigError if it does not have those of ``world``."""
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
    return comm


def _register(store: JsonStore, me: RankInfo, world: World, seconds: float) -> tuple[RankInfo, ...]:
    """Register this rank, and wait until rank 0 lists all ranks, or refuses the run."""
    # put, not set: of two processes with one rank, each sees which came first
    first = RankInfo(**store.put(rank_key("rank", me.rank), asdict(me)))
    if first != me:
        _refuse(store, ConfigError(f"two processes are rank {me.rank}: {first} and {me}; start each rank once"))
    if me.rank == 0:
        _decide(store, me, world, seconds)
    until = time.monotonic() + seconds + LINGER
    while (answer := store.get(RANKS)) is None:
        if time.monotonic() > until:
            raise HpclmError(f"{me} got no answer from rank 0 within {seconds:g} s; see its output")
        time.sleep(_pause(POLL, me.size))
    # before the answer is used: rank 0, whose end closes the store, waits for these
    store.set(rank_key("met", me.rank), True)
    if me.rank == 0:
        _wait_for_readers(store, me.size)
    if "refused" in answer:
        raise (ConfigError if answer["settings"] else HpclmError)(answer["refused"])
    ranks = tuple(RankInfo(*values) for values in answer["ranks"])
    if len(ranks) != me.size:
        raise ConfigError(f"the processes disagree: {ranks[0]} is one of {len(ranks)}, {me} one of {me.size}")
    return ranks


def _decide(store: JsonStore, me: RankInfo, world: World, seconds: float) -> None:
    """On rank 0: wait for all ranks, then start or refuse the run."""
    keys = [rank_key("rank", rank) for rank in range(me.size)]
    entries: list[Any] = []

    def decided() -> bool:
        entries[:] = store.get_all(keys) or []
        return bool(entries and None not in entries) or store.get(RANKS) is not None

    wait_until(decided, seconds, POLL / 5)
    entries = entries or [*map(store.get, keys)]
    missing = [rank for rank, entry in enumerate(entries) if entry is None]
    if missing:
        named = ", ".join(f"rank {rank}" + (f" ({world.hosts[rank]})" if world.hosts else "") for rank in missing[:16])
        more = f" and {len(missing) - 16} more" * (len(missing) > 16)
        text = f"{len(missing)} of {me.size} processes did not arrive within {seconds:g} s: {named}{more}; "
        _refuse(store, HpclmError(f"{text}look at their output, or raise cluster.start_seconds"))
        return
    ranks = [RankInfo(**entry) for entry in entries]
    for info in ranks:
        # said here with both numbers: the group's own start would only wait until its time limit
        if info.size != me.size:
            text = f"the processes disagree: {me} is one of {me.size}, {info} one of {info.size}; start them together"
        elif info.version != me.version:
            text = f"{me} runs hpclm {me.version}, {info} {info.version}; use one installation on all nodes"
        else:
            continue
        return _refuse(store, ConfigError(text))
    store.put(RANKS, {"ranks": [astuple(info) for info in ranks]})


def _wait_for_readers(store: JsonStore, size: int) -> None:
    """On rank 0: stay until all have read the answer."""
    keys = [rank_key("met", rank) for rank in range(size)]
    wait_until(lambda: all(store.get_all(keys) or [False]), LINGER, _pause(POLL, size))


def _refuse(store: JsonStore, error: HpclmError) -> None:
    """Publish that the run is refused; the first decision counts."""
    store.put(RANKS, {"refused": str(error), "settings": isinstance(error, ConfigError)})


def rank_key(name: str, rank: int) -> str:
    """The key of what a rank says under a name."""
    return f"hpclm/{name}/{rank}"
