"""The verdict of the preflight check: what is wrong, and which nodes are bad.

Everything here is a pure function of gathered facts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

from hpclm.node.facts import DECISIVE, Facts

AGREE = ("hpclm", "python", "torch", "cuda", "nccl", *DECISIVE, "driver", "device_name")
SKEW = 5.0  # seconds between clocks
SHM = 32 << 20  # bytes of /dev/shm for each process: NCCL and MPI keep their buffers there
OTHERS = 0.1  # of a GPU's memory
MIB, GIB = 1 << 20, 1 << 30
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
class Link:
    """The way from one node to another."""

    nodes: tuple[str, str]
    speed: float
    """GB/s of messages from the first to the second; 0 if they do not arrive."""
    error: str = ""


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
    """Clocks and shared memory of each node."""
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
    other = [node for node, look in looks.items() if "error" not in look and not look["same"]]
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


def links(measured: Sequence[Link]) -> list[Finding]:
    """Links that fail or are slow; a node whose links are all far slower than the median node's fastest one is bad.

    With two nodes there is nothing to compare with, so neither is bad.
    """
    best: dict[str, float] = {}
    for link in measured:
        for node in link.nodes:
            best[node] = max(best.get(node, 0.0), link.speed)
    slow = median_high(best.values()) / FAR if best else 0.0
    bad = [node for node in best if best[node] < slow]
    findings = []
    for link in measured:
        at_fault = tuple(node for node in link.nodes if node in bad)
        if link.error:
            findings.append(Finding(f"messages from {' to '.join(link.nodes)} fail: {link.error}", at_fault))
        elif link.speed < slow:
            text = f"messages from {' to '.join(link.nodes)}: {rate(link.speed)}; the fastest node does {rate(max(best.values()))}"
            findings.append(Finding(text, at_fault, serious=bool(at_fault)))
    if measured and not findings and max(best.values()) < SLUGGISH:
        text = f"no link between nodes does more than {rate(max(best.values()))}, less than gigabit Ethernet"
        findings.append(warning(f"{text}: is cluster.interface right?"))
    return findings


def remains(stuck: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Processes of earlier attempts that cannot be terminated, by node."""
    return [
        Finding(f"a process of an earlier attempt cannot be terminated on {node}: {process}", (node,))
        for node, left in stuck.items()
        for process in left
    ]


def rate(speed: float) -> str:
    """GB/s, rounded."""
    return f"{speed:.3g} GB/s"


def listing(items: Sequence[object], most: int = 8) -> str:
    """``a, b and c``, cut where it gets long."""
    words = [str(item) for item in items]
    if len(words) > most:
        words = [*words[:most], f"{len(words) - most} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
