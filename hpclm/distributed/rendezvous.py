"""The rendezvous of a run's ranks: they connect to one key-value store, PyTorch's TCPStore, and introduce themselves in it.

torchrun's agent already has a store. Otherwise rank 0 opens one on all interfaces, and the others try all addresses of its node: MPI
broadcasts them; under Slurm the job's supervisor exports them, and the port follows from job, step and restart. A client recognises the
right server by the run_id of the start.
"""

import itertools
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from hpclm.base import extras
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.config import ClusterConfig
from hpclm.distributed import network
from hpclm.distributed.bootstrap import OF_MPI, World
from hpclm.distributed.ranks import RankInfo

if TYPE_CHECKING:
    from torch.distributed import TCPStore

log = logging.getLogger(__name__)
SERVER = "hpclm/server"
LOOPBACK = "127.0.0.1"
PATIENCE = 1.0  # seconds for a server to answer before the next port is tried; a later answer still counts
SEARCH = 0.1  # seconds between two searches for the server
CROWD = 128  # clients; if there are more, each searches less often
LINGER = 2.0  # seconds that rank 0 keeps the store open so that others can read why the run cannot start
SHOWN_RANKS = 16


@dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous."""

    store: "TCPStore"
    ranks: tuple[RankInfo, ...]
    interface: str | None
    """The interface that leads to the other nodes; lo on a single node."""


def connect(world: World, settings: ClusterConfig) -> Rendezvous:
    """Connect to the other ranks of ``world``; every rank calls it.

    ConfigError if the ranks contradict each other, HpclmError if some do not arrive within cluster.start_seconds; both name the ranks.
    """
    store, host = _store(world, settings)
    address = network.address_towards(host) if host else network.own_address(socket.gethostname())
    try:
        ranks = introduce(store, RankInfo.of(world, address), settings.start_seconds, world.hosts)
    except HpclmError:
        if not world.rank:
            time.sleep(LINGER)
        raise
    others = [info for info in ranks if info.node != ranks[world.rank].node]
    nodes = [info.node for info in ranks]
    if not world.rank and len([*itertools.groupby(nodes)]) > len(set(nodes)):
        log.warning(
            "neighbouring ranks are on different nodes, which slows tensor parallelism: leave srun's --distribution out"
        )
    if not others:
        return Rendezvous(store, ranks, "lo")
    return Rendezvous(store, ranks, network.interface_of(network.address_towards(host or others[0].address)))


def introduce(store: "TCPStore", me: RankInfo, seconds: float, hosts: Sequence[str] = ()) -> tuple[RankInfo, ...]:
    """Exchange RankInfo with all ranks. ``hosts``: the host of each rank, if the launcher names them."""
    mine = json.dumps(asdict(me))
    first = store.compare_set(_key(me.rank), "", mine).decode()  # the entry of the first process with this rank
    if first != mine:
        raise ConfigError(f"two processes are rank {me.rank}: {_info(first)} and {me}; start each rank once")
    keys = [_key(rank) for rank in range(me.size)]
    try:
        for expected in (keys[:1], keys):  # rank 0 first: if it expects fewer ranks, the last one would never come
            store.wait(expected, timedelta(seconds=seconds))
            _agree(me, _info(store.get(keys[0])))
        ranks = tuple(map(_info, store.multi_get(keys)))
    except RuntimeError as error:
        raise _absent(store, me, seconds, hosts) from error
    for info in ranks:
        _agree(info, ranks[0])
    return ranks


def _key(rank: int) -> str:
    return f"hpclm/rank/{rank}"


def _info(text: str | bytes) -> RankInfo:
    return RankInfo(**json.loads(text))


def _agree(info: RankInfo, first: RankInfo) -> None:
    """ConfigError if a rank contradicts rank 0, ``first``: their process group would only wait until its time limit."""
    if info.size != first.size:
        raise ConfigError(
            f"the processes disagree: {first} is one of {first.size}, {info} one of {info.size}; start them together"
        )
    if info.version != first.version:
        raise ConfigError(
            f"{first} runs hpclm {first.version}, {info} {info.version}; use one installation on all nodes"
        )


def _absent(store: "TCPStore", me: RankInfo, seconds: float, hosts: Sequence[str]) -> HpclmError:
    """The error for ranks that have not arrived within ``seconds``."""
    try:
        missing = [rank for rank in range(me.size) if not store.check([_key(rank)])]
    except RuntimeError:
        missing = []
    if not missing:
        return HpclmError(f"{me} lost its connection to rank 0 during the start; see its output")
    named = ", ".join(f"rank {rank} ({hosts[rank]})" if hosts else f"rank {rank}" for rank in missing[:SHOWN_RANKS])
    if len(missing) > SHOWN_RANKS:
        named += f" and {len(missing) - SHOWN_RANKS} more"
    return HpclmError(
        f"{len(missing)} of {me.size} processes did not arrive within {seconds:g} s: {named}; look at their output, or "
        "raise cluster.start_seconds"
    )


class StoreCall(threading.Thread):
    """A connection to a store, in a thread: PyTorch's client waits forever for a server that accepts and never answers."""

    def __init__(self, call: Callable[[], Any]):
        super().__init__(name="hpclm-store", daemon=True)
        self.call = call
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        """Make the call; an error counts as no answer."""
        with suppress(RuntimeError):
            self.answer = self.call()

    def result(self, seconds: float) -> Any:
        """The answer; None without one within ``seconds``."""
        self.join(seconds)
        return self.answer


def serve(listener: socket.socket, world: World) -> "TCPStore":
    """Rank 0's store. It takes over the socket ``listener``, so that no other process can take the port in between."""
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    limit = timedelta(seconds=60)
    # introduce() waits for the other ranks, because it can name those that are missing
    store = TCPStore(LOOPBACK, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())
    store.set(SERVER, world.run_id)
    return store


def find(hosts: Sequence[str], ports: Sequence[int], world: World, seconds: float) -> tuple["TCPStore", str]:
    """Rank 0's store on one of ``hosts``, and its address; HpclmError if it is not there within ``seconds``."""
    until = time.monotonic() + seconds
    calls: dict[tuple[str, int], StoreCall | None] = {}
    while time.monotonic() < until:
        # each time, because a node that has just booted may get names later
        addresses = {host: network.resolved(host) for host in hosts}
        silent = {""}
        for port, address in itertools.product(ports, dict.fromkeys(addresses.values())):
            call = calls.get((address, port))
            if address not in silent and (call is None or not (call.is_alive() or call.answer)):
                # tried first, because PyTorch's client retries a wrong port until its own time limit
                answer = network.answers(address, port, seconds=2.0)
                if answer is None:
                    silent.add(address)
                call = StoreCall(partial(_client, address, port, world)) if answer else None
                calls[address, port] = call
            store = call.result(PATIENCE) if call else None
            if store:
                return store, address
        time.sleep(_pause(SEARCH, world.size))
    unknown = [host for host, address in addresses.items() if not address]
    why = ""
    if unknown:
        why = f" ({', '.join(unknown)}: no IPv4 address is known here)"
    raise _unreachable(world, hosts, seconds, why)


def _client(address: str, port: int, world: World) -> "TCPStore | None":
    """The store at an address, if it belongs to this launch."""
    from torch.distributed import TCPStore

    server = TCPStore(address, port, None, False, timedelta(seconds=30), wait_for_workers=False)
    if server.get(SERVER) != world.run_id.encode():
        return None
    return server


def check_ipv4(world: World) -> None:
    """ConfigError if ranks on several machines must meet over IPv4 and this machine has no address."""
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
    """Seconds between two searches of one client, so that ``clients`` together search no more often than CROWD clients would."""
    return seconds * max(1.0, clients / CROWD)


def _store(world: World, settings: ClusterConfig) -> tuple["TCPStore", str]:
    """The run's store, and its host; an empty host if this rank serves the store."""
    if world.launcher in ("torchrun", "local"):
        return _of_torchrun(world, settings), world.masters[0]
    check_ipv4(world)
    comm = _mpi(world) if world.launcher in OF_MPI else None
    if comm:
        world = replace(world, run_id=secrets.token_hex(16))  # all ranks use rank 0's
    several_nodes = world.local_size < world.size
    hosts = list(world.masters) if several_nodes else [LOOPBACK]
    ports = network.candidates(world.run_id)
    listener = None
    if world.rank == 0:
        listener = network.listen(ports, "" if several_nodes else LOOPBACK)
    if comm:
        if listener:
            ports = [listener.getsockname()[1]]
            if several_nodes:
                hosts = network.own_addresses(settings.interface)
        hosts, ports, run_id = comm.bcast((hosts, ports, world.run_id))
        world = replace(world, run_id=run_id)
    if listener:
        return serve(listener, world), ""
    return find(hosts, ports, world, settings.start_seconds)


def _of_torchrun(world: World, settings: ClusterConfig, env: Mapping[str, str] = os.environ) -> Any:
    """The store that torchrun names, served by its agent or by rank 0."""
    from torch.distributed import DistNetworkError, PrefixStore, TCPStore

    serves = world.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port = int(env["MASTER_PORT"])
    limit = timedelta(seconds=settings.start_seconds)
    try:
        store = TCPStore(world.masters[0], port, None, serves, limit, wait_for_workers=False)
    except DistNetworkError as error:
        why = f" ({str(error).splitlines()[0]})"
        raise _unreachable(world, [f"{world.masters[0]}:{port}"], settings.start_seconds, why) from None
    store.set_timeout(timedelta(minutes=10))
    # torchrun's agent keeps its store over restarts: this attempt must not read keys of the last one
    return PrefixStore(world.run_id, store)


def _mpi(world: World) -> Any:
    """MPI's communicator of all ranks; ConfigError if its ranks are not those of ``world``."""
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
