"""The rendezvous of a run's ranks: they connect to one key-value store, PyTorch's TCPStore.

torchrun's agent already has one. Otherwise rank 0 opens it on all interfaces, and the others try all addresses of its node:
MPI broadcasts them; under Slurm the job's supervisor exports them, and the port follows from job, step and restart. A client recognises
the right server by the name of the start. In the store each rank tells the others who it is.
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

from hpclm import extras
from hpclm.config import ClusterConfig
from hpclm.distributed import network
from hpclm.distributed.bootstrap import OF_MPI, World
from hpclm.distributed.ranks import RankInfo
from hpclm.errors import ConfigError, HpclmError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

log = logging.getLogger(__name__)
SERVER = "hpclm/server"
LOOPBACK = "127.0.0.1"
PATIENCE = 1.0  # seconds for a server to answer before the next port is tried; a later answer still counts
SEARCH = 0.1  # seconds between two searches for the server
CROWD = 128  # with more clients, each asks less often
LINGER = 2.0  # seconds that rank 0, whose end closes the store, stays so that others can read why the run cannot start
SHOWN_RANKS = 16


@dataclass(frozen=True)
class Rendezvous:
    """What a rank knows after the rendezvous."""

    store: "TCPStore"
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
    """Tell the others who this rank is, and learn who they are. ``hosts``: of each rank, where the launcher says them."""
    mine = json.dumps(asdict(me))
    # of two processes with one rank, both learn which came first
    there = store.compare_set(_key(me.rank), "", mine).decode()
    if there != mine:
        raise ConfigError(f"two processes are rank {me.rank}: {_info(there)} and {me}; start each rank once")
    keys = [_key(rank) for rank in range(me.size)]
    try:
        for waited in (keys[:1], keys):  # first rank 0's: of more ranks than it knows, the last would never come
            store.wait(waited, timedelta(seconds=seconds))
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
    """ConfigError if a rank contradicts rank 0: their process group would only wait until its time limit."""
    if info.size != first.size:
        raise ConfigError(
            f"the processes disagree: {first} is one of {first.size}, {info} one of {info.size}; start them together"
        )
    if info.version != first.version:
        raise ConfigError(
            f"{first} runs hpclm {first.version}, {info} {info.version}; use one installation on all nodes"
        )


def _absent(store: "TCPStore", me: RankInfo, seconds: float, hosts: Sequence[str]) -> HpclmError:
    """The error for ranks that have not arrived."""
    try:
        missing = [rank for rank in range(me.size) if not store.check([_key(rank)])]
    except RuntimeError:
        missing = []
    if not missing:
        return HpclmError(f"{me} lost its connection to rank 0 during the start; see its output")
    named = ", ".join(f"rank {rank}" + (f" ({hosts[rank]})" if hosts else "") for rank in missing[:SHOWN_RANKS])
    more = f" and {len(missing) - SHOWN_RANKS} more" if len(missing) > SHOWN_RANKS else ""
    return HpclmError(
        f"{len(missing)} of {me.size} processes did not arrive within {seconds:g} s: {named}{more}; look at their output, or "
        "raise cluster.start_seconds"
    )


class StoreCall(threading.Thread):
    """A connection to a store, in a thread: PyTorch's client waits forever for a server that accepts and never answers."""

    def __init__(self, call: Callable[[], Any]):
        super().__init__(name="hpclm-store", daemon=True)
        self.call, self.answer = call, None
        self.start()

    def run(self) -> None:
        """Call; an error counts as no answer."""
        with suppress(RuntimeError):
            self.answer = self.call()

    def result(self, seconds: float) -> Any:
        """The answer; None if there is none within ``seconds``."""
        self.join(seconds)
        return self.answer


def serve(listener: socket.socket, world: World) -> "TCPStore":
    """Rank 0's store on the socket ``listener``, which it takes over, so that no other process can take the port in between."""
    from torch.distributed import TCPStore

    port, limit = listener.getsockname()[1], timedelta(seconds=60)
    # it need not wait: introduce() counts the ranks, and can name those that are missing
    store = TCPStore(LOOPBACK, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())
    store.set(SERVER, world.run_id)
    return store


def find(hosts: Sequence[str], ports: Sequence[int], world: World, seconds: float) -> tuple["TCPStore", str]:
    """Rank 0's store on one of ``hosts``, and its address; HpclmError if it is not there within ``seconds``."""
    until, calls = time.monotonic() + seconds, dict[tuple[str, int], StoreCall | None]()
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
                call = calls[address, port] = StoreCall(partial(_client, address, port, world)) if answer else None
            if call and (store := call.result(PATIENCE)):
                return store, address
        time.sleep(_pause(SEARCH, world.size))
    unknown = [host for host, address in addresses.items() if not address]
    raise _unreachable(
        world, hosts, seconds, f" ({', '.join(unknown)}: no IPv4 address is known here)" if unknown else ""
    )


def _client(address: str, port: int, world: World) -> "TCPStore | None":
    """The store at an address, if it is the one of this launch."""
    from torch.distributed import TCPStore

    server = TCPStore(address, port, None, False, timedelta(seconds=30), wait_for_workers=False)
    return server if server.get(SERVER) == world.run_id.encode() else None


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


def _store(world: World, settings: ClusterConfig) -> tuple["TCPStore", str]:
    """The run's store, and its host if that is another rank's."""
    if world.launcher in ("torchrun", "local"):
        return _of_torchrun(world, settings), world.masters[0]
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


def _of_torchrun(world: World, settings: ClusterConfig, env: Mapping[str, str] = os.environ) -> Any:
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
