"""The verdict of the preflight check: what is wrong, and which nodes are bad.

Everything here is a pure function of gathered facts.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

from hpclm.node.facts import DECISIVE, Facts

AGREE = ("hpclm", "python", "torch", "cuda", "nccl", *DECISIVE, "driver", "device_name")
SKEW = 5.0  # seconds between clocks
SHM = 32 << 20  # bytes of /dev/shm for each process: NCCL and MPI keep their buffers there
FILES = 1024
OTHERS = 0.1  # of a GPU's memory
MIB, GIB = 1 << 20, 1 << 30
ROUNDS = 7  # partners of each node at most, so that the cost does not grow with the number of nodes
FAR = 5.0  # times slower than the others is a fault
SLUGGISH = 0.05  # GB/s; half of what gigabit Ethernet does


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    text: str
    bad: tuple[str, ...] = ()
    """The bad nodes, if it is theirs."""
    serious: bool = True
    """Whether the run must not start."""


def warning(text: str) -> Finding:
    """A finding that does not stop the run."""
    return Finding(text, serious=False)


@dataclass(frozen=True)
class Pair:
    """The link between two nodes."""

    nodes: tuple[str, str]
    speed: float
    """GB/s of an all-reduce between them, in each direction."""


def nodes_of(ranks: Sequence[Facts]) -> dict[str, list[int]]:
    """Node -> its ranks."""
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        found.setdefault(facts["node"], []).append(rank)
    return found


def agreement(ranks: Sequence[Facts]) -> list[Finding]:
    """Versions and devices that differ between nodes; nodes that differ from the majority are bad."""
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


def other_code(digests: Sequence[tuple[str, str]], contents: Sequence[Mapping[str, str]]) -> str:
    """Which nodes run which code, and the files that differ.

    ``digests``: node, and digest of the code, of each rank; ``contents``: file -> digest, of each rank.
    """
    nodes: dict[str, list[str]] = {}
    for node, digest in dict.fromkeys(digests):
        nodes.setdefault(digest, []).append(node)
    listed = "; ".join(f"{digest} on {listing(names)}" for digest, names in nodes.items())
    pairs = Counter(pair for files in contents for pair in files.items())
    names = sorted({name for (name, _), ranks in pairs.items() if ranks < len(contents)})
    return f"the nodes run different code: {listed}; different: {listing(names, 3)}"


def devices(ranks: Sequence[Facts]) -> list[Finding]:
    """GPUs that several ranks share, or that other processes use."""
    users: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        if facts.get("uuid"):
            users.setdefault(facts["uuid"], []).append(rank)
    findings = [
        Finding(
            f"ranks {listing(sharing)} on {ranks[sharing[0]]['node']} all use {ranks[sharing[0]]['device']} "
            f"({uuid}), with CUDA_VISIBLE_DEVICES={ranks[sharing[0]].get('visible')}; start one process for each GPU: "
            f"request one GPU for each process of a node"
        )
        for uuid, sharing in users.items()
        if len(sharing) > 1
    ]
    for rank, facts in enumerate(ranks):
        used, size = facts.get("device_used", 0), facts.get("device_total", 0)
        if len(users.get(facts.get("uuid", ""), ())) == 1 and used > OTHERS * size:
            findings.append(
                warning(
                    f"{used / GIB:.1f} of {size / GIB:.1f} GiB of {facts['device']} on {facts['node']} (rank {rank}) are "
                    f"in use by other processes: nvidia-smi on that node lists them"
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
            findings.append(warning(f"the clock of {node} is {abs(skew):.0f} s {how} that of {ranks[0]['node']}"))
        shm = first.get("shm")
        if shm and shm["free"] < SHM * len(members):
            findings.append(
                warning(
                    f"/dev/shm of {node} has {shm['free'] // MIB} of {shm['size'] // MIB} MiB free, and {len(members)} "
                    f"processes may want {SHM * len(members) // MIB} MiB; in a container: --shm-size or --ipc=host"
                )
            )
        if first["open_files"] is not None and first["open_files"] < FILES:
            findings.append(warning(f"{node} allows a process {first['open_files']} open files: ulimit -n {FILES}"))
    return findings


def disks(out: str, looks: Mapping[str, Mapping[str, Any]], room: int) -> list[Finding]:
    """Whether every node sees the same run directory ``out``, can write there, and has ``room`` bytes free."""
    findings = []
    home = next(iter(looks))

    def bad_nodes(nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(nodes) if 2 * len(nodes) < len(looks) else ()

    errors: dict[str, list[str]] = {}
    for node, look in looks.items():
        if "error" in look:
            errors.setdefault(look["error"], []).append(node)
    for error, nodes in errors.items():
        findings.append(Finding(f"{out} cannot be written on {listing(nodes)}: {error}", bad_nodes(nodes)))
    other = [node for node, look in looks.items() if "error" not in look and not (look["same"] and look["back"])]
    if other:
        text = (
            f"{out} on {listing(other)} is not the folder that {home} has: files written on one are not visible on the other; "
            f"choose an out= on a file system that all nodes share"
        )
        findings.append(Finding(text, bad_nodes(other)))
    full = [node for node, look in looks.items() if look.get("free", room) < room]
    if full:
        least = min(looks[node]["free"] for node in full)
        text = f"{out} has {least / MIB:,.1f} MiB free on {listing(full)}; a checkpoint may take {room / MIB:,.1f} MiB"
        findings.append(Finding(f"{text}: free some, or choose another out=", bad_nodes(full)))
    return findings


def rounds(nodes: int, most: int = ROUNDS) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of nodes: in each round a node has one partner or none, and never the same one again."""
    ring = [*range(nodes), *([-1] * (nodes % 2))]  # a round-robin tournament: one stays, the others rotate
    found = []
    for _ in range(min(most, len(ring) - 1)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def judge(pairs: Sequence[Pair]) -> tuple[list[Pair], list[str]]:
    """The slow pairs, and the bad nodes: even their fastest link is slow compared with the median node's.

    With two nodes there is nothing to compare with, so neither is bad.
    """
    best: dict[str, float] = {}
    for pair in pairs:
        for node in pair.nodes:
            best[node] = max(best.get(node, 0.0), pair.speed)
    usual = median_high(best.values()) if best else 0.0
    slow = [pair for pair in pairs if pair.speed < usual / FAR]
    bad = [node for node in best if best[node] < usual / FAR]
    return slow, bad


def links(pairs: Sequence[Pair]) -> list[Finding]:
    """Slow links between nodes; a node whose links are all slow is bad."""
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
        warning(
            f"{' and '.join(pair.nodes)} reach each other at {rate(pair.speed)}; the fastest pair does {rate(best)}"
        )
        for pair in slow
        if not set(pair.nodes) & set(bad)
    ]
    if pairs and not bad and best < SLUGGISH:
        text = f"no pair of nodes does more than {rate(best)}, less than gigabit Ethernet: is cluster.interface right?"
        findings.append(warning(text))
    return findings


def remains(local: Mapping[str, Mapping[str, Any]], abandoned: Sequence[str]) -> list[Finding]:
    """What earlier attempts left on each node: processes that cannot be terminated, and locks without a holder."""
    findings = [
        Finding(f"a process of an earlier attempt cannot be terminated on {node}: {process}", (node,))
        for node, found in local.items()
        for process in found["stuck"]
    ]
    for path, age in unheld(local).items():
        text = f"{path} locks a build of a PyTorch extension, and no process of these nodes holds it; the last write in its "
        text += f"folder was {age / 60:.0f} minutes ago"
        do = (
            "removed"
            if path in abandoned
            else f"builds wait for it; if no other job is building: rm {shlex.quote(path)}"
        )
        findings.append(warning(f"{text}: {do}"))
    return findings


def unheld(local: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Locks that no process on any node has open -> seconds since the last write in their folder."""
    seen = [lock for found in local.values() for lock in found["locks"]]
    held = {lock["path"] for lock in seen if lock["holder"] is not None}
    return {lock["path"]: lock["age"] for lock in seen if lock["path"] not in held}


def rate(speed: float) -> str:
    """GB/s, rounded."""
    return f"{speed:.3g} GB/s"


def listing(items: Sequence[object], most: int = 8) -> str:
    """``a, b and c``, cut where it gets long."""
    words = [str(item) for item in items]
    if len(words) > most:
        words = [*words[:most], f"{len(words) - most} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
