"""Read the logical tensors of a checkpoint, however they are divided over its files."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpclm.base.errors import HpclmError
from hpclm.checkpoint.directory import unreadable
from hpclm.checkpoint.format import File
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest

Span = tuple[int, int]
AT_ONCE = 128  # open files; a process may have 1,024, and a checkpoint has one or more per rank


class CheckpointTensors:
    """Reads and verifies blocks of a checkpoint's tensors; files stay open inside the context."""

    def __init__(self, folder: Path, manifest: Manifest, wrong: dict[str, str] | None = None):
        """``wrong``: if given, a failure is recorded here, under "bad" (corrupt) or "failed" (disk error), instead of raised, and all
        further blocks are 0. So every process finishes the load, and the processes can agree on the outcome."""
        self.folder = folder
        self.manifest = manifest
        self.wrong = wrong
        self._files: dict[str, File] = {}
        """Least recently used first; only the most recent ``AT_ONCE`` stay open."""

    def __enter__(self) -> "CheckpointTensors":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: tuple(entry["shape"]) for name, entry in self.manifest.tensors.items()}

    def whole(self, name: str) -> Tensor:
        """A whole tensor."""
        shape = self.manifest.tensors[name]["shape"]
        return self.block(name, [0] * len(shape), shape)

    def block(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """A block of a tensor; HpclmError if the files do not contain all of it, or cannot be read."""
        if name not in self.manifest.tensors:
            raise HpclmError(f"checkpoint {self.folder} has no tensor {name}; it was saved by a different kind of run")
        if self.wrong:
            return torch.zeros(tuple(size))
        try:
            return self._block(name, start, size)
        except (OSError, BadCheckpoint) as error:
            if self.wrong is None:
                raise unreadable(self.folder, error) from error
            self.wrong["bad" if isinstance(error, BadCheckpoint) else "failed"] = str(error)
            return torch.zeros(tuple(size))

    def _block(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        parts = [(part, self._overlap(name, part, start, size)) for part in self.manifest.tensors[name]["parts"]]
        parts = [(part, overlap) for part, overlap in parts if all(low < high for low, high in overlap)]
        count = sum(prod(high - low for low, high in overlap) for _, overlap in parts)
        if count != prod(size):  # checked before memory is allocated for a manifest's claim
            raise BadCheckpoint(f"its files contain {count} of the {prod(size)} requested values of {name}")
        block = None
        for part, overlap in parts:
            low = [begin - offset for (begin, _), offset in zip(overlap, part["start"], strict=True)]
            high = [end - offset for (_, end), offset in zip(overlap, part["start"], strict=True)]
            piece = self._file(part["file"]).values(part.get("key", name), low, high)
            if tuple(piece.shape) == tuple(size):
                return piece
            if block is None:
                block = torch.empty(tuple(size), dtype=piece.dtype)
            block[tuple(slice(low - a, high - a) for (low, high), a in zip(overlap, start, strict=True))] = piece
        return torch.empty(tuple(size)) if block is None else block

    def _overlap(self, name: str, part: Mapping[str, Any], start: Sequence[int], size: Sequence[int]) -> list[Span]:
        """The overlap of a part with a block, along each dimension; empty spans without overlap."""
        corners = zip(part["start"], part["size"], start, size, strict=True)
        return [(max(a, b), min(a + n, b + m)) for a, n, b, m in corners]

    def _file(self, name: str) -> File:
        file = self._files.pop(name, None) or File(self.folder, name, self.manifest.infos[name])
        self._files[name] = file
        if len(self._files) > AT_ONCE:
            [*self._files.values()][-AT_ONCE - 1].close()
        return file
