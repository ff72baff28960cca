"""The files that one process writes to the staging directory of a checkpoint, now or in a background thread."""

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

LARGEST = 4 << 30  # bytes of tensors in a file, so that reading and verification can be parallelised


class Snapshot:
    """Copies of shards in CPU memory; buffers are allocated once and reused by every save."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, tuple[int, ...]], Shard] = {}

    def take(self, shards: Iterable[Shard]) -> list[Shard]:
        """Copies of the shards, which do not change while training continues."""
        taken, device = [], False
        for shard in shards:
            source = shard.tensor.detach()
            key = (shard.name, shard.start)
            copy = self._copies.get(key)
            if copy is None or copy.tensor.shape != source.shape or copy.tensor.dtype != source.dtype:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                self._copies[key] = copy = Shard(shard.name, buffer, shard.shape, shard.start)
            copy.tensor.copy_(source, non_blocking=True)
            device = device or source.is_cuda
            taken.append(copy)
        if device:
            torch.cuda.synchronize()
        return taken


class BackgroundWrite:
    """Runs ``work`` in a background thread."""

    def __init__(self, work: Callable[[], dict[str, Any]]):
        self._found: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, args=(work,), name="hpclm-save", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], dict[str, Any]]) -> None:
        time.sleep(0.001)  # yields the GIL; otherwise the training thread waits up to 5 ms for it
        try:
            self._found = work()
        except BaseException as error:
            self._found = {"error": f"{type(error).__name__}: {error}", "parts": []}

    def done(self) -> bool:
        """Whether it has finished."""
        return not self._thread.is_alive()

    def result(self) -> dict[str, Any]:
        """Wait for the result."""
        self._thread.join()
        return self._found


def size(shards: Sequence[Shard]) -> int:
    """Bytes of the tensors."""
    return sum(shard.tensor.numel() * shard.tensor.element_size() for shard in shards)


def write_shards(staging_dir: Path, rank: int, shards: Sequence[Shard], largest: int = LARGEST) -> dict[str, Any]:
    """Write the shards of ``rank`` into ``staging_dir``; the files' sizes and hashes and the place of each part, or the error."""
    parts, files = [], {}
    try:
        for number, group in enumerate(file_groups(shards, largest)):
            name = f"rank-{rank:05d}.safetensors" if not number else f"rank-{rank:05d}-{number}.safetensors"
            tensors: dict[str, Tensor] = {}
            for shard in group:
                part: dict[str, Any] = {"file": name, "start": list(shard.start), "size": list(shard.tensor.shape)}
                key = shard.name
                if key in tensors:  # a second block of the same tensor
                    part["key"] = key = f"{key}#{len(tensors)}"
                tensors[key] = shard.tensor
                parts.append((shard.name, list(shard.shape), part))
            files[name] = asdict(write(staging_dir / name, list(tensors.items())))
    except OSError as error:
        return {"error": error.strerror or str(error), "parts": []}
    return {"files": files, "parts": parts}


def file_groups(shards: Sequence[Shard], largest: int) -> list[list[Shard]]:
    """Consecutive shards grouped into files of at most ``largest`` bytes; a larger tensor gets its own file."""
    found: list[list[Shard]] = []
    room = 0
    for shard in shards:
        bytes_ = size([shard])
        if not found or bytes_ > room:
            found.append([])
            room = largest
        found[-1].append(shard)
        room -= bytes_
    return found
