"""The logical tensors of a checkpoint, whatever blocks its files hold them in."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hpclm.checkpoint.format import File
from hpclm.checkpoint.manifest import Manifest
from hpclm.errors import HpclmError


class Tensors:
    """Reads blocks of a verified checkpoint's tensors; a file is opened when it is first needed, until ``close``."""

    def __init__(self, folder: Path, manifest: Manifest, kept: Mapping[str, Tensor] | None = None):
        """``kept``: the bytes of files that are in memory already. Blocks must not be written to."""
        self.folder, self.manifest, self.kept = folder, manifest, kept or {}
        self._stack = ExitStack()
        self._open: dict[str, File] = {}

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every whole tensor by name."""
        return {name: tuple(entry["shape"]) for name, entry in self.manifest.tensors.items()}

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        shape = self.manifest.tensors[name]["shape"]
        return self.block(name, [0] * len(shape), shape)

    def block(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """A block of a tensor; HpclmError when the files do not hold all of it, or cannot be read."""
        if name not in self.manifest.tensors:
            raise HpclmError(f"checkpoint {self.folder} has no tensor {name}; it was saved by another kind of run")
        try:
            return self._block(name, start, size)
        except (OSError, ValueError, KeyError) as error:
            raise HpclmError(
                f"checkpoint {self.folder} cannot be read now: {error}; look at the disk, then start again"
            ) from error

    def _block(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        found, filled = None, 0
        for part in self.manifest.tensors[name]["parts"]:
            file = self._file(part["file"])
            key = part.get("key", name)
            inside = list(_overlap(part["start"], file.shape(key), start, size))
            if any(low >= high for low, high in inside):
                continue
            low = [a - b for (a, _), b in zip(inside, part["start"], strict=True)]
            high = [a - b for (_, a), b in zip(inside, part["start"], strict=True)]
            piece = file.block(key, low, high)
            if tuple(piece.shape) == tuple(size):
                return piece
            if found is None:
                found = torch.empty(tuple(size), dtype=piece.dtype)
            found[tuple(slice(low - a, high - a) for (low, high), a in zip(inside, start, strict=True))] = piece
            filled += piece.numel()
        if found is None or filled != prod(size):
            raise HpclmError(f"checkpoint {self.folder} holds {filled} of the {prod(size)} values of {name} asked for")
        return found

    def _file(self, name: str) -> File:
        if name not in self._open:
            self._open[name] = file = File(self.folder / name, self.kept.get(name))
            self._stack.callback(file.close)
        return self._open[name]


def _overlap(
    start: Sequence[int], size: Sequence[int], other: Sequence[int], width: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Where two blocks meet, along each dimension: first and one past the last."""
    for a, n, b, m in zip(start, size, other, width, strict=True):
        yield max(a, b), min(a + n, b + m)
