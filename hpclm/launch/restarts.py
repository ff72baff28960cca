"""What torchrun's agents exchange between two starts of the ranks: why the last one ended, restarts left.

Each start is a round of torchrun's rendezvous, with its own store.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import RendezvousHandler

from hpclm.distributed import failure, network
from hpclm.distributed.rendezvous import RANKS, roster
from hpclm.distributed.signed import SECRET, SignedStore

REASON_KEY = "hpclm/reason"  # in the store of a round: why it ended, from the first agent that knows
REASON = 500  # characters that are kept of it


@dataclass(frozen=True)
class AgentInfo:
    """What one agent sends the others when a round begins."""

    restarts_left: int
    reason: str = ""
    """Why the last round ended, according to the ranks' store."""
    again: bool = False
    """Whether there was a last round."""


def exchange(group: WorkerGroup, mine: AgentInfo) -> list[AgentInfo]:
    """The information of all agents of this round, in the order of their ranks; called by each."""
    store = group.store
    assert store is not None and group.group_rank is not None and group.group_world_size is not None
    store.set(f"hpclm/agent/{group.group_rank}", json.dumps(asdict(mine)))
    told = (json.loads(store.get(f"hpclm/agent/{rank}")) for rank in range(group.group_world_size))
    return [AgentInfo(**each) for each in told]


def reason(agents: list[AgentInfo]) -> str:
    """Why the last round ended; empty in the first round."""
    why = next(filter(None, (agent.reason for agent in agents)), "")
    why = why or "the ranks of another node ended" * any(agent.again for agent in agents)
    return "".join(c if c.isprintable() else " " for c in why[:REASON])


def ranks_store(group: WorkerGroup, run_id: str) -> SignedStore | None:
    """The store of the ranks of this round, ``run_id``; None if it ended with the node of rank 0."""
    host, port = str(group.master_addr), int(group.master_port or 0)
    with suppress(RuntimeError):
        if network.answers(host, port, seconds=1.0):
            server = TCPStore(host, port, None, False, timedelta(seconds=5), wait_for_workers=False)
            return SignedStore(PrefixStore(run_id, server), run_id, os.environ.get(SECRET, ""))
    return None


def first_failure(store: SignedStore | None) -> str:
    """Which rank failed first, and why, from the ranks' store; empty if unknown."""
    with suppress(RuntimeError, ValueError, TypeError, LookupError):
        ranks = roster(store.get(RANKS)) if store is not None else ()
        if store is not None and (found := failure.read(store, len(ranks))):
            lines = found.describe(ranks).strip().splitlines()
            return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return ""


def publish_again(handler: RendezvousHandler) -> None:
    """Have rank 0's agent publish the address of the ranks' store in every round: PyTorch does it in the first one
    only, and an agent that joins later would wait for it."""
    if hasattr(handler, "_bootstrap_store_info"):
        handler._bootstrap_store_info = None
