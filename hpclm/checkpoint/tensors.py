"""Read the logical tensors of a checkpoint, however they are divided over its files."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpclm.checkpoint.directory import unreadable
from hpclm.checkpoint.format import File
from hpclm.checkpoint.manifest import Manifest
from hpclm.checkpoint.parts import overlap, overlapping
from hpclm.checkpoint.schema import ChecksumMismatch
from hpclm.errors import HpclmError

Span = tuple[int, int]
AT_ONCE = 128  # open files; a process may have 1,024, and a checkpoint has one or more per rank


class Tensors:
    """Reads and verifies blocks of a checkpoint's tensors; files stay open inside the context."""

    def __init__(self, folder: Path, manifest: Manifest, wrong: dict[str, str] | None = None):
        """``wrong``: if given, a failure is recorded here, under "bad" (corrupt) or "failed" (disk error), instead of raised,
        and all further blocks are 0. So every process finishes the load, and all can agree on the outcome."""
        self.folder, self.manifest, self.wrong = folder, manifest, wrong
        self._files: dict[str, File] = {}
        self._open: dict[str, File] = {}
        """The open ones, least recently used first."""

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
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
        except (OSError, ChecksumMismatch) as error:
            if self.wrong is not None:
                self.wrong["bad" if isinstance(error, ChecksumMismatch) else "failed"] = str(error)
                return torch.zeros(tuple(size))
            raise unreadable(self.folder, error) from error

    def _block(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        rows = (start[0], start[0] + size[0]) if start else (0, 1)
        parts = [
            (part, inside)
            for some in self.manifest.tensors[name]["parts"]
            for part in overlapping(some, *rows)
            if (inside := self._inside(name, part, start, size)) is not None
        ]
        count = sum(prod(high - low for low, high in inside) for _, inside in parts)
        if count != prod(size):  # checked before allocating what a forged manifest may claim
            raise ChecksumMismatch(f"its files contain {count} of the {prod(size)} requested values of {name}")
        if overlap([inside for _, inside in parts]):  # then others are missing
            raise ChecksumMismatch(f"its files contain values of {name} more than once")
        found = None
        for part, inside in parts:
            low = [a - b for (a, _), b in zip(inside, part["start"], strict=True)]
            high = [a - b for (_, a), b in zip(inside, part["start"], strict=True)]
            file, key = self._file(part["file"]), part.get("key", name)
            if list(file.shape(key)) != part.get("size", list(file.shape(key))):
                raise ChecksumMismatch(f"{part['file']} holds {key} of shape {file.shape(key)}, not {part['size']}")
            piece = file.values(key, low, high)
            if tuple(piece.shape) == tuple(size):
                return piece
            if found is None:
                found = torch.empty(tuple(size), dtype=piece.dtype)
            found[tuple(slice(low - a, high - a) for (low, high), a in zip(inside, start, strict=True))] = piece
        return torch.empty(tuple(size)) if found is None else found

    def _inside(
        self, name: str, part: Mapping[str, Any], start: Sequence[int], size: Sequence[int]
    ) -> list[Span] | None:
        """The overlap of a part with a block, along each dimension; None if they do not overlap."""
        shape = part.get("size")  # earlier versions did not save it
        if shape is None:
            shape = self._file(part["file"]).shape(part.get("key", name))
        if not len(shape) == len(part["start"]) == len(start):
            raise ChecksumMismatch(f"{part['file']} holds {name} in {len(shape)} dimensions, not in {len(start)}")
        corners = zip(part["start"], shape, start, size, strict=True)
        inside = [(max(a, b), min(a + n, b + m)) for a, n, b, m in corners]
        return None if any(low >= high for low, high in inside) else inside

    def _file(self, name: str) -> File:
        if name not in self._files:
            self._files[name] = File(self.folder, name, self.manifest.infos[name])
        file = self._open.pop(name, self._files[name])
        self._open[name] = file
        if len(self._open) > AT_ONCE:
            self._open.pop(next(iter(self._open))).close()
        return file
