"""What torchrun's agents exchange between two starts of the ranks: why the last one ended, restarts left, spare nodes.

Each start is a round of torchrun's rendezvous, with its own store. With spare nodes there are more agents than a round
takes; PyTorch keeps the rest waiting (its redundancy list) until an agent leaves or its heartbeats stop.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp

from hpclm.distributed import failure, network
from hpclm.distributed.rendezvous import RANKS, roster
from hpclm.distributed.signed import SECRET, SignedStore
from hpclm.node import processes

REASON_KEY = "hpclm/reason"  # in the store of a round: why it ended, from the first agent that knows
REASON = 500  # characters that are kept of it
HEAD_START = 4.0  # seconds that a spare has to take the place of a node whose rank has failed, once all have left
LONGEST_WAIT = 60.0  # seconds for all to leave
OUTCOME = 10.0  # seconds for the other agents to publish their exit codes


@dataclass(frozen=True)
class AgentInfo:
    """What one agent sends the others when a round begins."""

    host: str
    restarts_left: int
    """By its own count; an agent that was a spare has counted none."""
    reason: str = ""
    """Why the last round ended, according to the ranks' store."""
    before: tuple[str, ...] = ()
    """Hosts of the last round."""


def exchange(group: WorkerGroup, mine: AgentInfo) -> list[AgentInfo]:
    """The information of all agents of this round, in the order of their ranks; called by each."""
    store = group.store
    assert store is not None and group.group_rank is not None and group.group_world_size is not None
    store.set(f"hpclm/agent/{group.group_rank}", json.dumps(asdict(mine)))
    told = (json.loads(store.get(f"hpclm/agent/{rank}")) for rank in range(group.group_world_size))
    return [AgentInfo(**each) for each in told]


def reason(agents: list[AgentInfo]) -> str:
    """Why the last round ended, and which nodes have been replaced; empty in the first round."""
    why = next(filter(None, (agent.reason for agent in agents)), "")
    before = max((agent.before for agent in agents), key=len)
    hosts = {agent.host for agent in agents}
    gone, new = sorted(set(before) - hosts), sorted(hosts - set(before))
    if before and gone:
        why += f"{'; ' * bool(why)}spare node {', '.join(new)} replaces {', '.join(gone)}"
    why = why or "the ranks of another node ended" * bool(before)
    return "".join(c if c.isprintable() else " " for c in why[:REASON])


def ranks_store(group: WorkerGroup, run_id: str) -> SignedStore | None:
    """The store of the ranks of this round, ``run_id``; None if it ended with the node of rank 0."""
    host, port = str(group.master_addr), int(group.master_port or 0)
    with suppress(RuntimeError):
        if network.answers(host, port, seconds=1.0):
            server = TCPStore(host, port, None, False, timedelta(seconds=5), wait_for_workers=False)
            return SignedStore(PrefixStore(run_id, server), run_id, os.environ.get(SECRET, ""))
    return None


def first_failure(store: SignedStore | None) -> tuple[int | None, str]:
    """The rank that failed first, and why, from the ranks' store; None if unknown."""
    with suppress(RuntimeError, ValueError, TypeError, LookupError):
        ranks = roster(store.get(RANKS)) if store is not None else ()
        if store is not None and (found := failure.read(store, len(ranks))):
            lines = found.describe(ranks).strip().splitlines()
            return found.rank, lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return None, ""


def publish_again(handler: RendezvousHandler) -> None:
    """Have rank 0's agent publish the address of the ranks' store in every round: PyTorch does it in the first one
    only, and an agent that joins later would wait for it."""
    if hasattr(handler, "_bootstrap_store_info"):
        handler._bootstrap_store_info = None


def yield_to_spare(handler: Any) -> None:
    """Leave the round, and rejoin once the next one is complete, or if no spare node takes this one's place."""
    handler._stop_heartbeats()
    holder = handler._state_holder
    before = holder.state.round
    handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + 30)
    until, all_left = time.monotonic() + LONGEST_WAIT, False
    while time.monotonic() < until and not (holder.state.round > before and holder.state.complete):
        time.sleep(0.5)
        holder.sync()
        if holder.state.closed:
            return
        if holder.state.round > before and not all_left:
            until, all_left = time.monotonic() + HEAD_START, True


def outcome(handler: Any, nodes: int, group_rank: int | None, code: int) -> int:
    """The exit code of the run: the highest of the ``nodes`` that took part in its last round.

    ``group_rank``: this agent's place among them, None for a spare; ``code``: its own.
    """
    store: Store = PrefixStore("hpclm/outcome", handler._store)
    if group_rank is not None:
        store.set(str(group_rank), str(code))
    keys = [str(rank) for rank in range(nodes)]
    processes.wait_until(lambda: store.check(keys), OUTCOME, pause=0.1)
    return max([code, *(int(store.get(key)) for key in keys if store.check([key]))])
