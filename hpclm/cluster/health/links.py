"""Links between nodes: which to measure, and which of the measured are too slow."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

ROUNDS = 7  # partners of each node at most, so that the cost does not grow with the number of nodes
FAR = 5.0  # times slower than the others is a fault
SLUGGISH = 0.05  # GB/s; half of what gigabit Ethernet does


@dataclass(frozen=True)
class Pair:
    """The link between two nodes."""

    nodes: tuple[str, str]
    speed: float
    """GB/s of an all-reduce between them, in each direction."""


def rounds(nodes: int, most: int = ROUNDS) -> list[list[tuple[int, int]]]:
    """Pairs of ``nodes`` nodes such that in each round everyone has one partner (or rests), and never one twice."""
    ring = [*range(nodes), *([-1] * (nodes % 2))]  # the tournament's circle: one stays, the others move on
    found = []
    for _ in range(min(most, len(ring) - 1)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def judge(pairs: Sequence[Pair]) -> tuple[list[Pair], list[str]]:
    """The pairs that are slow, and the nodes to blame: those none of whose links is as fast as most nodes'.

    Every node's best link is what it can do; most nodes are taken to be well. With two nodes there is nothing to
    compare with, and nobody is blamed.
    """
    best: dict[str, float] = {}
    for pair in pairs:
        for node in pair.nodes:
            best[node] = max(best.get(node, 0.0), pair.speed)
    usual = median_high(best.values()) if best else 0.0
    slow = [pair for pair in pairs if pair.speed < usual / FAR]
    bad = [node for node in best if best[node] < usual / FAR]
    return slow, bad
