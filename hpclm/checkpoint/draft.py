"""What one process writes of a checkpoint: at once, or in a thread beside the training that goes on."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpclm.checkpoint.format import write
from hpclm.engine import Shard

LARGEST = 4 << 30  # bytes of tensors in a file, so that reading and checking it can be shared out


class Snapshot:
    """Copies in the CPU's memory, which is used again for every save: a second one costs no more than the copying."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, shards: Iterable[Shard]) -> list[Shard]:
        """The shards with values that do not change when training goes on."""
        taken, device = [], False
        for shard in shards:
            source = shard.tensor.detach()
            key = (shard.name, shard.start)
            own = self._held.get(key)
            if own is None or own.shape != source.shape or own.dtype != source.dtype:
                pinned = source.device.type == "cuda"
                self._held[key] = own = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            own.copy_(source, non_blocking=True)
            device = device or source.device.type == "cuda"
            taken.append(Shard(shard.name, own, shard.shape, shard.start))
        if device:
            torch.cuda.synchronize()
        return taken


class Writing:
    """A call of ``work`` in a thread of its own."""

    def __init__(self, work: Callable[[], dict[str, Any]]):
        self._found: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, args=(work,), name="hpclm-save", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], dict[str, Any]]) -> None:
        time.sleep(0.001)  # else who started this thread waits for the interpreter, which switches every 5 ms
        try:
            self._found = work()
        except BaseException as error:
            self._found = {"error": f"{type(error).__name__}: {error}", "parts": []}

    def over(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def result(self) -> dict[str, Any]:
        """What the call gave, once it has ended."""
        self._thread.join()
        return self._found


def size(held: Sequence[Shard]) -> int:
    """Bytes of the tensors."""
    return sum(shard.tensor.numel() * shard.tensor.element_size() for shard in held)


def write_shards(draft: Path, rank: int, held: Sequence[Shard], largest: int = LARGEST) -> dict[str, Any]:
    """Write what process ``rank`` holds into the folder ``draft``: files with their facts, and where each part is; or the error."""
    parts, files = [], {}
    try:
        for number, group in enumerate(groups(held, largest)):
            name = f"rank-{rank:05d}.safetensors" if not number else f"rank-{rank:05d}-{number}.safetensors"
            tensors: dict[str, Tensor] = {}
            for shard in group:
                part: dict[str, Any] = {"file": name, "start": list(shard.start)}
                key = shard.name
                if key in tensors:  # a second block of the same tensor
                    part["key"] = key = f"{key}#{len(tensors)}"
                tensors[key] = shard.tensor
                parts.append((shard.name, list(shard.shape), part))
            files[name] = asdict(write(draft / name, list(tensors.items())))
    except OSError as error:
        return {"error": error.strerror or str(error), "parts": []}
    return {"files": files, "parts": parts}


def groups(held: Sequence[Shard], largest: int) -> list[list[Shard]]:
    """Neighbours that go into one file of at most ``largest`` bytes; a larger tensor has one to itself."""
    found: list[list[Shard]] = []
    room = 0
    for shard in held:
        bytes_ = size([shard])
        if not found or bytes_ > room:
            found.append([])
            room = largest
        found[-1].append(shard)
        room -= bytes_
    return found
