"""What follows from what the processes of a run found: what is wrong, and which nodes are to blame.

Everything here is a pure function of gathered values.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpclm.cluster.health.facts import Facts
from hpclm.cluster.health.links import SLUGGISH, Pair, judge

AGREE = ("hpclm", "python", "torch", "cuda", "nccl", "driver", "device_name")
SKEW = 5.0  # seconds between clocks
SHM = 32 << 20  # bytes of /dev/shm for each process: NCCL and MPI keep their buffers there
FILES = 1024
OTHERS = 0.1  # of a GPU's memory
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    text: str
    bad: tuple[str, ...] = ()
    """Nodes to blame."""
    serious: bool = True
    """Whether the run must not begin."""


def nodes_of(ranks: Sequence[Facts]) -> dict[str, list[int]]:
    """Node -> its ranks."""
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        found.setdefault(facts["node"], []).append(rank)
    return found


def agreement(ranks: Sequence[Facts]) -> list[Finding]:
    """Versions and devices that differ between nodes; the fewer are to blame, and nobody when it is one to one."""
    findings = []
    nodes = nodes_of(ranks)
    for key in AGREE:
        value = {
            node: " and ".join(sorted({str(ranks[rank].get(key)) for rank in members}))
            for node, members in nodes.items()
        }
        groups = Counter(value.values()).most_common()
        if len(groups) == 1 and " and " not in groups[0][0]:
            continue
        clear = len(groups) > 1 and groups[0][1] > groups[1][1]
        bad = tuple(node for node in nodes if clear and value[node] != groups[0][0])
        listed = "; ".join(
            f"{text} on {listing([node for node in nodes if value[node] == text])}" for text, _ in groups
        )
        findings.append(Finding(f"{key.replace('_', ' ')} differs: {listed}", bad))
    return findings


def devices(ranks: Sequence[Facts]) -> list[Finding]:
    """GPUs that several processes share, or that others use."""
    users: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        if facts.get("uuid"):
            users.setdefault(facts["uuid"], []).append(rank)
    findings = [
        Finding(
            f"ranks {listing(sharing)} on {ranks[sharing[0]]['node']} all use {ranks[sharing[0]]['device']} "
            f"({uuid}), with CUDA_VISIBLE_DEVICES={ranks[sharing[0]].get('visible')}; start one process for each GPU: "
            f"ask for as many GPUs as processes on a node"
        )
        for uuid, sharing in users.items()
        if len(sharing) > 1
    ]
    for rank, facts in enumerate(ranks):
        used, size = facts.get("device_used", 0), facts.get("device_total", 0)
        if len(users.get(facts.get("uuid", ""), ())) == 1 and used > OTHERS * size:
            findings.append(
                Finding(
                    f"{used / GIB:.1f} of {size / GIB:.1f} GiB of {facts['device']} on {facts['node']} (rank {rank}) are in "
                    f"use already: nvidia-smi on that node shows by whom",
                    serious=False,
                )
            )
    return findings


def machines(ranks: Sequence[Facts]) -> list[Finding]:
    """Clocks, shared memory and limits of each node."""
    findings = []
    for node, members in nodes_of(ranks).items():
        first = ranks[members[0]]
        skew = first["clock"]
        if abs(skew) > SKEW:
            how = "ahead of" if skew > 0 else "behind"
            findings.append(
                Finding(f"the clock of {node} is {abs(skew):.0f} s {how} that of {ranks[0]['node']}", (), False)
            )
        shm = first.get("shm")
        if shm and shm["free"] < SHM * len(members):
            findings.append(
                Finding(
                    f"/dev/shm of {node} has {shm['free'] // MIB} of {shm['size'] // MIB} MiB free, and {len(members)} "
                    f"processes may want {SHM * len(members) // MIB} MiB; in a container: --shm-size or --ipc=host",
                    serious=False,
                )
            )
        if first["open_files"] < FILES:
            findings.append(
                Finding(f"{node} allows a process {first['open_files']} open files: ulimit -n {FILES}", serious=False)
            )
    return findings


def disks(out: str, looks: Mapping[str, Mapping[str, Any]], room: int) -> list[Finding]:
    """Whether every node has the run directory ``out``, the same one, with ``room`` bytes."""
    findings = []
    home = next(iter(looks))

    def blamed(nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(nodes) if 2 * len(nodes) < len(looks) else ()

    errors: dict[str, list[str]] = {}
    for node, look in looks.items():
        if "error" in look:
            errors.setdefault(look["error"], []).append(node)
    for error, nodes in errors.items():
        findings.append(Finding(f"{out} cannot be written on {listing(nodes)}: {error}", blamed(nodes)))
    other = [node for node, look in looks.items() if "error" not in look and not (look["same"] and look["back"])]
    if other:
        text = (
            f"{out} on {listing(other)} is not the folder that {home} has: what one writes the other does not see; "
            f"give an out= on a file system that all nodes share"
        )
        findings.append(Finding(text, blamed(other)))
    full = [node for node, look in looks.items() if look.get("free", room) < room]
    if full:
        least = min(looks[node]["free"] for node in full)
        text = f"{out} has {least / MIB:,.1f} MiB free on {listing(full)}; a checkpoint may take {room / MIB:,.1f} MiB"
        findings.append(Finding(f"{text}: free some, or give another out=", blamed(full)))
    return findings


def links(pairs: Sequence[Pair]) -> list[Finding]:
    """Slow connections between nodes; a node that has no other is to blame."""
    slow, bad = judge(pairs)
    best = max((pair.speed for pair in pairs), default=0.0)
    findings = [
        Finding(
            f"{node} is reached at {rate(max(pair.speed for pair in pairs if node in pair.nodes))} at most; "
            f"the fastest pair of nodes does {rate(best)}",
            (node,),
        )
        for node in bad
    ]
    findings += [
        Finding(
            f"{' and '.join(pair.nodes)} reach each other at {rate(pair.speed)}; the fastest pair does {rate(best)}",
            serious=False,
        )
        for pair in slow
        if not set(pair.nodes) & set(bad)
    ]
    if pairs and not bad and best < SLUGGISH:
        text = f"no pair of nodes does more than {rate(best)}, less than gigabit Ethernet: is cluster.interface right?"
        findings.append(Finding(text, serious=False))
    return findings


def remains(local: Mapping[str, Mapping[str, Any]], abandoned: Sequence[str]) -> list[Finding]:
    """What earlier attempts left on each node: processes that would not end, and locks that nobody holds."""
    findings = [
        Finding(f"a process of an earlier attempt cannot be ended on {node}: {process}", (node,))
        for node, found in local.items()
        for process in found["stuck"]
    ]
    for path, age in unheld(local).items():
        text = f"{path} locks a build of a PyTorch extension, and no process of these nodes holds it; the last write in its "
        text += f"folder was {age / 60:.0f} minutes ago"
        do = (
            "removed" if path in abandoned else f"if no other job builds it: rm {shlex.quote(path)}; builds wait for it"
        )
        findings.append(Finding(f"{text}: {do}", serious=False))
    return findings


def unheld(local: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Locks that no process of any node has open -> seconds since anything in their folder was written."""
    seen = [lock for found in local.values() for lock in found["locks"]]
    held = {lock["path"] for lock in seen if lock["holder"] is not None}
    return {lock["path"]: lock["age"] for lock in seen if lock["path"] not in held}


def rate(speed: float) -> str:
    """GB/s in few digits."""
    return f"{speed:.3g} GB/s"


def listing(items: Sequence[object], most: int = 8) -> str:
    """``a, b and c``, cut where it gets long."""
    words = [str(item) for item in items]
    if len(words) > most:
        words = [*words[:most], f"{len(words) - most} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
