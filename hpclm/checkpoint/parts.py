"""Where the values of each tensor are: parts, each in a file; and what ranks that share a tensor out evenly save, as one entry.

Needs no PyTorch.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

Part = Mapping[str, Any]
NUMBERED = re.compile(r"rank-(\d+)((?:-\d+)?\.safetensors)")


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same parts; three or more that follow each other in even steps are one part with ``repeat``: how many they are, and by
    how many ranks and rows each is on from the one before."""
    plain: list[Part] = []
    alike: dict[Any, list[tuple[int, int, Part]]] = {}
    for part in parts:
        name = NUMBERED.fullmatch(part["file"])
        if name is None or not part["start"]:
            plain.append(part)
            continue
        kind = (tuple(part["start"][1:]), tuple(part["size"]), part.get("key"), name[2])
        alike.setdefault(kind, []).append((part["start"][0], int(name[1]), part))
    for found in alike.values():
        found.sort(key=lambda each: each[:2])
        while found:
            count, ranks, rows = _run(found)
            part = found[0][2]
            plain.append({**part, "repeat": [count, ranks, rows]} if count > 2 else part)
            del found[: count if count > 2 else 1]
    return plain


def _run(found: Sequence[tuple[int, int, Part]]) -> tuple[int, int, int]:
    """How many parts from the first on follow each other in even steps, and the steps: ranks and rows."""
    if len(found) < 3:
        return 1, 0, 0
    ranks, rows = found[1][1] - found[0][1], found[1][0] - found[0][0]
    count = 1
    while count < len(found):
        steps = found[count][1] - found[count - 1][1], found[count][0] - found[count - 1][0]
        if steps != (ranks, rows) or ranks < 1 or rows < 1:
            break
        count += 1
    return count, ranks, rows


def overlapping(part: Part, low: int, high: int) -> Iterator[Part]:
    """The parts that ``part`` stands for and that have rows from ``low`` up to but excluding ``high``."""
    if "repeat" not in part:
        yield part
        return
    count, ranks, rows = part["repeat"]
    begin, size = part["start"][0], part["size"][0]
    first, last = max(0, (low - begin - size) // rows + 1), min(count, -(-(high - begin) // rows))
    for number in range(first, last):
        start = [begin + number * rows, *part["start"][1:]]
        yield {**part, "file": _file(part["file"], number * ranks), "start": start}


def values(parts: Iterable[Part]) -> int | None:
    """How many values the parts have; None if they do not say."""
    found = [(part.get("size"), part.get("repeat", [1])[0]) for part in parts]
    return None if any(size is None for size, _ in found) else sum(prod(size or ()) * count for size, count in found)


def overlap(boxes: Iterable[list[tuple[int, int]]]) -> bool:
    """Whether any two boxes, each given by its first value and the one after its last along each dimension, share a value."""
    found = sorted(boxes)
    for number, box in enumerate(found):
        for other in found[number + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break  # so do all that follow
            if all(low < end and begin < high for (low, high), (begin, end) in zip(box, other, strict=True)):
                return True
    return False


def files_of(parts: Iterable[Part], limit: int) -> set[str]:
    """The files of all parts; of what one stands for, no more than ``limit``."""
    found = {(part["file"], *part.get("repeat", (1, 0))[:2]) for part in parts}
    return {_file(name, number * ranks) for name, count, ranks in found for number in range(min(count, limit))}


def _file(name: str, ranks: int) -> str:
    """The file of the rank that comes ``ranks`` after that of the file ``name``."""
    found = NUMBERED.fullmatch(name)
    return f"rank-{int(found[1]) + ranks:05d}{found[2]}" if found and ranks else name


@dataclass
class Plans:
    """The parts that each rank has written; a rank sends its list to rank 0 only when it differs from that of the previous save."""

    _own: list[Any] | None = None
    _known: dict[int, list[Any]] = field(default_factory=dict)
    _from: list[list[Any]] = field(default_factory=list)
    _tensors: dict[str, dict[str, Any]] = field(default_factory=dict)

    def message(self, found: dict[str, Any]) -> dict[str, Any]:
        """What this rank sends of ``found``, a result of write_shards."""
        if "error" in found:
            return found
        if found["parts"] == self._own:
            return {**found, "parts": None}
        self._own = found["parts"]
        return found

    def complete(self, received: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """On rank 0: the messages of all ranks, with the parts that they did not send again."""
        for rank, found in enumerate(received):
            if found["parts"] is not None and "error" not in found:
                self._known[rank] = found["parts"]
        return [
            found if "error" in found else {**found, "parts": self._known[rank]} for rank, found in enumerate(received)
        ]

    def tensors(self, written: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Every tensor's shape and parts, from the results of all ranks; worked out again only if they have changed."""
        parts = [found["parts"] for found in written]
        if len(parts) != len(self._from) or any(a is not b for a, b in zip(parts, self._from, strict=True)):
            found: dict[str, dict[str, Any]] = {}
            for name, shape, part in (each for some in parts for each in some):
                found.setdefault(name, {"shape": shape, "parts": []})["parts"].append(part)
            self._tensors = {name: {**entry, "parts": joined(entry["parts"])} for name, entry in found.items()}
            self._from = parts
        return self._tensors
