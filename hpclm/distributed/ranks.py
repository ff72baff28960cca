"""The ranks of a run, as each of them knows the others."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpclm import __version__
from hpclm.base import files
from hpclm.base.terminal import ranges
from hpclm.distributed import network
from hpclm.distributed.bootstrap import World

SHOWN_HOSTS = 8


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank, as the others know it."""

    rank: int
    size: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = 0
    version: str = __version__
    address: str = ""
    """Its IPv4 address on the route to rank 0."""
    machine: str = ""
    """The machine, or container, that its PID belongs to (``files.here``)."""
    networks: str = ""
    """All IPv4 addresses of its machine except loopback's. Clones of a running machine share its boot ID, but not these addresses."""
    start: str = ""
    """Name of this start of the run, for folder names; all ranks use rank 0's."""

    @classmethod
    def of(cls, world: World, address: str = "") -> "RankInfo":
        """This process, as a rank of ``world``."""
        return cls(
            world.rank,
            world.size,
            pid=os.getpid(),
            address=address,
            machine=files.here(),
            networks=" ".join(sorted(ipv4 for ipv4 in network.addresses().values() if not ipv4.startswith("127."))),
            start=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
        )

    @property
    def node(self) -> tuple[str, str, str]:
        """Ranks with the same value share a loopback interface."""
        return self.host, files.network_of(self.machine), self.networks

    @property
    def process_table(self) -> tuple[str, str]:
        """Ranks with the same value share a process table."""
        return self.machine, self.networks

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


def named_ranks(some: Sequence[int], ranks: Sequence[RankInfo]) -> str:
    """The ranks ``some`` and their hosts, for the log."""
    if len(some) == 1:
        return str(ranks[some[0]])
    hosts = sorted({ranks[rank].host for rank in some})
    more = ", ..." if len(hosts) > SHOWN_HOSTS else ""
    return f"ranks {ranges(some)} on {', '.join(hosts[:SHOWN_HOSTS])}{more}"
