"""The verdict of the preflight check and of ``hpclm doctor``: the problems, and the bad nodes.

Everything here is a pure function of gathered facts.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

from hpclm.base.terminal import ranges
from hpclm.diagnostics.facts import DECISIVE, Facts
from hpclm.node.import_errors import WAY_OUT

AGREE = ("hpclm", "python", "torch", "cuda", "nccl", *DECISIVE, "driver", "device_name")
SHM = 32 << 20  # bytes of /dev/shm for each process: NCCL and MPI keep their buffers there
OTHERS = 0.1  # fraction of a GPU's memory that other processes may use without a warning
MIB = 1 << 20
GIB = 1 << 30
FAR = 5.0  # a link that is slower by this factor is at fault


@dataclass(frozen=True)
class NodeFinding:
    """A problem that the preflight check has found."""

    text: str
    bad: tuple[str, ...] = ()
    """The bad nodes, if nodes are at fault."""
    serious: bool = True
    """Whether the run must not start."""


def warning(text: str) -> NodeFinding:
    """A finding that does not stop the run."""
    return NodeFinding(text, serious=False)


@dataclass(frozen=True)
class Link:
    """The network link from one node to another."""

    nodes: tuple[str, str]
    speed: float
    """GB/s of messages from the first to the second; 0 if they do not arrive."""
    error: str = ""


def nodes_of(ranks: Sequence[Facts]) -> dict[str, list[int]]:
    """Maps each node to its ranks. A name shared by several machines is followed by the first rank of each: ``ubuntu (rank 4)``."""
    nodes: dict[tuple[str, str | None], list[int]] = {}
    for rank, facts in enumerate(ranks):
        nodes.setdefault((facts["node"], facts.get("machine")), []).append(rank)
    shared = Counter(name for name, _ in nodes)
    return {
        name if shared[name] == 1 else f"{name} (rank {members[0]})": members for (name, _), members in nodes.items()
    }


def grouped(values: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Group pairs of a node and its value as value -> nodes, the most common value first."""
    groups: dict[str, list[str]] = {}
    for node, value in dict.fromkeys(values):
        groups.setdefault(value, []).append(node)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def problems(facts: Facts) -> Iterator[str]:
    """Problems that would stop a run of one process."""
    gpus = facts.get("gpus", 0)
    local = facts["local_size"]
    launcher = facts["launcher"]
    failures = facts.get("import_failures", ())
    yield from failures
    if facts["torch"] is None and not failures:
        path = facts.get("outside", {}).get("torch")
        text = f"PyTorch cannot be loaded ({facts['error']}): reinstall it, or load the modules it was built with"
        if path:
            text += f"; torch comes from {path}, outside the environment"
        yield text
    yield from facts.get("broken", ())
    if 1 < gpus < local:
        yield f"{local} processes see {gpus} GPUs: request one GPU for each process of a node"
    if "MPI" in launcher and facts["mpi4py"] is None:
        yield f"{launcher} started this process, but mpi4py is not installed: pip install 'hpclm[mpi]', for your mpirun's MPI"


def hints(facts: Facts) -> Iterator[str]:
    """Facts that will not stop a run of one process, but may surprise its user."""
    if facts["torch"] and not facts.get("import_failures"):
        outside = [f"{name} ({path})" for name, path in facts.get("outside", {}).items()]
        if outside:
            yield f"from outside the environment: {', '.join(outside)}; {WAY_OUT}"
    if facts["torch"] and facts["driver"] and not facts["gpus"]:
        yield (
            f"this machine has GPUs (driver {facts['driver']}), but PyTorch, built for CUDA {facts['cuda']}, sees none, with "
            f"CUDA_VISIBLE_DEVICES={facts['visible']}: request GPUs from the scheduler, or install a build for that driver"
        )


def agreement(ranks: Sequence[Facts]) -> list[NodeFinding]:
    """Versions and devices that differ between nodes; nodes that differ from the majority are bad."""
    findings = []
    nodes = nodes_of(ranks).items()
    for key in AGREE:
        node_values = [(node, sorted({str(ranks[rank].get(key)) for rank in members})) for node, members in nodes]
        groups = grouped((node, " and ".join(values)) for node, values in node_values)
        if len(groups) == 1 and len(node_values[0][1]) == 1:
            continue
        usual, *others = groups.values()
        bad = []
        if others and len(usual) > len(others[0]):
            bad = [node for group in others for node in group]
        listed = "; ".join(f"{value} on {listing(names)}" for value, names in groups.items())
        findings.append(NodeFinding(f"{key.replace('_', ' ')} differs: {listed}", tuple(bad)))
    return findings


def other_code(digests: Sequence[tuple[str, str]], contents: Sequence[Mapping[str, str]]) -> str:
    """Which nodes run which code, and the files that differ.

    ``digests``: node and code digest of each rank; ``contents``: file -> digest, for each rank.
    """
    listed = "; ".join(f"{digest} on {listing(nodes)}" for digest, nodes in grouped(digests).items())
    copies = Counter(pair for files in contents for pair in files.items())
    names = sorted({name for (name, _), ranks in copies.items() if ranks < len(contents)})
    return f"the nodes run different code: {listed}; different: {listing(names, 3)}"


def devices(ranks: Sequence[Facts]) -> list[NodeFinding]:
    """GPUs that several ranks share, or that other processes use."""
    users: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        if facts.get("uuid"):
            users.setdefault(facts["uuid"], []).append(rank)
    findings = []
    for uuid, sharing in users.items():
        first = ranks[sharing[0]]
        used = first.get("device_used", 0)
        size = first.get("device_total", 0)
        if len(sharing) > 1:
            text = (
                f"ranks {listing(sharing)} on {first['node']} all use {first['device']} ({uuid}), with CUDA_VISIBLE_DEVICES="
                f"{first.get('visible')}; start one process for each GPU: request one GPU for each process of a node"
            )
            findings.append(NodeFinding(text))
        elif used > OTHERS * size:
            text = (
                f"{used / GIB:.1f} of {size / GIB:.1f} GiB of {first['device']} on {first['node']} (rank {sharing[0]}) are in use "
                "by other processes: nvidia-smi on that node lists them"
            )
            findings.append(warning(text))
    return findings


def memory(ranks: Sequence[Facts]) -> list[NodeFinding]:
    """Nodes with little shared memory."""
    findings = []
    for node, members in nodes_of(ranks).items():
        shm = ranks[members[0]]["shm"]
        needed = SHM * len(members)
        if shm and shm["free"] < needed:
            text = (
                f"/dev/shm of {node} has {shm['free'] // MIB} of {shm['total'] // MIB} MiB free, and {len(members)} processes may "
                f"want {needed // MIB} MiB; in a container: --shm-size or --ipc=host"
            )
            findings.append(warning(text))
    return findings


def cores(ranks: Sequence[Facts]) -> list[NodeFinding]:
    """Ranks bound to the same core although the node has enough cores to spread them."""
    findings = []
    for node, members in nodes_of(ranks).items():
        bound = {rank: frozenset(numbers(ranks[rank]["allowed_cores"])) for rank in members}
        available = ranks[members[0]]["cores_of_job"]
        unavoidable = max(1, math.ceil(len(members) / available))
        for shared in sorted(set(bound.values()), key=lambda cpus: (len(cpus), min(cpus, default=0))):
            crowd = [rank for rank in members if bound[rank] <= shared]
            if len(crowd) <= len(shared) * unavoidable:
                continue
            text = (
                f"ranks {ranges(crowd)} on {node} are all bound to {'core' if len(shared) == 1 else 'cores'} {ranges(shared)}, of "
                f"{available} that the job has there: they wait for one another. Give each rank separate cores: srun "
                "--cpu-bind=cores with job.cpus_per_task, mpirun --bind-to core; unset OMP_PROC_BIND before a launcher starts"
            )
            findings.append(warning(text))
    return findings


def numbers(text: str) -> set[int]:
    """The numbers of ``ranges``: 0-2,5 -> 0, 1, 2, 5."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",") if part]
    return {number for first, *last in ends for number in range(first, (last or [first])[0] + 1)}


def disks(out: str, probed: Mapping[str, Mapping[str, Any]], room: int) -> list[NodeFinding]:
    """Whether every node sees the same run directory ``out``, can write there, and has ``room`` bytes free."""

    def finding(nodes: Sequence[str], problem: str) -> NodeFinding:
        return NodeFinding(f"{out} {problem}", tuple(nodes) if 2 * len(nodes) < len(probed) else ())

    errors = grouped((node, probe["error"]) for node, probe in probed.items() if "error" in probe)
    findings = [finding(nodes, f"cannot be written on {listing(nodes)}: {error}") for error, nodes in errors.items()]
    other = [node for node, probe in probed.items() if not probe.get("same", True)]
    if other:
        text = f"on {listing(other)} is not the folder that {next(iter(probed))} has: files written on one are not visible on the other"
        findings.append(finding(other, f"{text}; choose an out= on a file system that all nodes share"))
    full = [node for node, probe in probed.items() if probe.get("free", room) < room]
    if full:
        min_free = min(probed[node]["free"] for node in full) / MIB
        text = f"has {min_free:,.1f} MiB free on {listing(full)}; a checkpoint may take {room / MIB:,.1f} MiB"
        findings.append(finding(full, f"{text}: free some, or choose another out="))
    return findings


def links(measured: Sequence[Link]) -> list[NodeFinding]:
    """Links that fail or are slow. A node is bad if all its links are far slower than the median node's fastest link.

    With two nodes, neither counts as bad, because no third node shows which one is slow.
    """
    best: dict[str, float] = {}
    for link in measured:
        for node in link.nodes:
            best[node] = max(best.get(node, 0.0), link.speed)
    slow = median_high(best.values()) / FAR if best else 0.0
    findings = []
    for link in measured:
        bad = tuple(node for node in link.nodes if best[node] < slow)
        messages = f"messages from {' to '.join(link.nodes)}"
        if link.error:
            findings.append(NodeFinding(f"{messages} fail: {link.error}", bad))
        elif link.speed < slow:
            text = f"{messages}: {rate(link.speed)}; the fastest node does {rate(max(best.values()))}"
            findings.append(NodeFinding(text, bad, serious=bool(bad)))
    return findings


def rate(speed: float) -> str:
    """``speed`` in GB/s, rounded, as text."""
    return f"{speed:.3g} GB/s"


def listing(items: Sequence[object], max_items: int = 8) -> str:
    """``a, b and c``, truncated if it gets long."""
    words = [str(item) for item in items]
    if len(words) > max_items:
        words = [*words[:max_items], f"{len(words) - max_items} more"]
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"
