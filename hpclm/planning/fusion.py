"""The kernels of a trace: one for each operation, and fewer where torch.compile fuses operations.

Inside a compiled region, everything between two matrix products, attentions or collectives that shares values becomes one
kernel. It reads what comes from outside once, and writes what is used outside once. What only the backward pass
uses is computed again there from its inputs, where that moves fewer bytes. Inductor may need more, for example two passes for
a sum over rows next to a sum over columns.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpclm.planning.parts import Place
from hpclm.planning.record import Operation, Read

REDUCTIONS = frozenset(
    ["sum", "mean", "amax", "var_mean", "native_layer_norm", "_fused_rms_norm", "linalg_vector_norm", "embedding"]
)
"""Operations that are not computed again in the backward pass."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, or the several of one operation."""

    name: str
    kind: str
    part: str
    place: Place
    read: int
    written: int
    flops: float
    launches: int
    operation: Operation
    """The operation, or the largest of those that are fused."""
    count: int
    """How often it runs in a step."""

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.read + self.written


def kernels(operations: Sequence[tuple[Operation, int]]) -> list[Kernel]:
    """The kernels of a step."""
    regions: dict[int, list[tuple[Operation, int]]] = defaultdict(list)
    found = []
    users = _users(one for one, _ in operations)
    for one, count in operations:
        if one.region is None or one.kind != "memory":
            found.append(_alone(one, count))
        if one.region is not None:
            regions[one.region].append((one, count))
    for number in [number for number in regions if number + 1 in regions]:
        forward, backward = ([one for one, _ in regions[n]] for n in (number, number + 1))
        again = recomputed(backward, _again(forward, backward, users))
        regions[number + 1] = [(one, count) for one, (_, count) in zip(again, regions[number + 1], strict=True)]
    users = _users(
        [*(one for one, _ in operations if one.region is None), *(o for m in regions.values() for o, _ in m)]
    )
    for members in regions.values():
        found += _fused([one for one, _ in members], users, members[0][1])
    return found


Inputs = tuple[Read, ...]


def _users(operations: Iterable[Operation]) -> dict[int, list[Operation]]:
    """The operations that read each value."""
    found: dict[int, list[Operation]] = defaultdict(list)
    for one in operations:
        for value, *_ in one.inputs:
            found[value].append(one)
    return found


def _again(
    forward: Sequence[Operation], backward: Sequence[Operation], users: dict[int, list[Operation]]
) -> dict[int, Inputs]:
    """Values of a forward pass that its backward pass computes again, and what it reads in place of each."""
    fusible = {id(one) for one in (*forward, *backward) if one.kind == "memory"}
    used = {read.value for one in backward for read in one.inputs}
    found: dict[int, Inputs] = {}
    for one in forward:
        if one.kind != "memory" or len(one.outputs) != 1 or one.name in REDUCTIONS:
            continue
        [(value, size)] = one.outputs
        inputs = tuple(read for own in one.inputs for read in found.get(own.value, (own,)))
        added = sum({read.value: read.size for read in inputs if read.value not in used}.values())
        if all(id(user) in fusible for user in users[value]) and added <= 2 * size:
            found[value] = inputs
    return found


def recomputed(backward: Sequence[Operation], again: dict[int, Inputs]) -> list[Operation]:
    """The operations of a backward pass, which compute ``again`` in place of reading it."""
    return [
        replace(one, inputs=tuple(read for own in one.inputs for read in again.get(own.value, (own,))))
        if one.kind == "memory"
        else one
        for one in backward
    ]


def _alone(one: Operation, count: int) -> Kernel:
    cost = one.cost
    return Kernel(
        one.name, one.kind, one.part, one.place, cost.read, cost.written, cost.flops, cost.launches, one, count
    )


def _fused(region: Sequence[Operation], users: dict[int, list[Operation]], count: int) -> Iterable[Kernel]:
    """The fused kernels of one region."""
    for group in _groups(region):
        inside = {id(one) for one in group}
        made: dict[int, int] = {}
        taken: dict[int, dict[int, int]] = defaultdict(dict)  # of each value, the bytes at each offset
        stored: dict[int, int] = {}
        for one in group:
            for read in one.inputs:
                if read.value not in made:
                    found = taken[read.value]
                    found[read.offset] = max(found.get(read.offset, 0), read.size)
                    stored[read.value] = read.stored
            made |= dict(one.outputs)
        written = sum(
            size
            for value, size in made.items()
            if not users[value] or any(id(user) not in inside for user in users[value])
        )
        largest = max(group, key=lambda one: one.cost.read + one.cost.written)
        wanted = sum(min(sum(parts.values()), stored[value]) for value, parts in taken.items())
        gathered = min(wanted, sum(one.cost.read for one in group))  # some read only a few rows
        name = largest.name if len(group) == 1 else f"{len(group)} fused with {largest.name}"
        yield Kernel(name, "memory", largest.part, largest.place, gathered, written, 0.0, 1, largest, count)


def _groups(region: Sequence[Operation]) -> list[list[Operation]]:
    """The operations that become one kernel: connected by values, without a matrix product or the like between them."""
    depth: dict[int, int] = {}  # matrix products and the like on the longest way to a value
    parent: dict[int, int] = {}
    reader: dict[tuple[int, int], int] = {}  # (depth, value) -> a member of the group that has it

    def root(number: int) -> int:
        while parent[number] != number:
            number = parent[number]
        return number

    for number, one in enumerate(region):
        own = max((depth.get(read.value, 0) for read in one.inputs), default=0)
        fusible = one.kind == "memory"
        for value, _ in one.outputs:
            depth[value] = own + (not fusible)
        if not fusible:
            continue
        parent[number] = number
        for value, *_ in (*one.inputs, *one.outputs):
            other = reader.setdefault((own, value), number)
            parent[root(number)] = root(other)
    found: dict[int, list[Operation]] = defaultdict(list)
    for number in parent:
        found[root(number)].append(region[number])
    return list(found.values())
