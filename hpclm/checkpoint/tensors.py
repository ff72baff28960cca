"""The logical tensors of a checkpoint, whatever blocks its files hold them in."""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hpclm.checkpoint.format import Differs, File
from hpclm.checkpoint.manifest import Manifest
from hpclm.errors import HpclmError

AT_ONCE = (
    128  # files that are open; a process may have no more than 1,024 in all, and a checkpoint has one of each rank
)


class Tensors:
    """Reads blocks of a checkpoint's tensors, and holds what it reads against the hashes; files stay open while it is entered."""

    def __init__(self, folder: Path, manifest: Manifest, wrong: dict[str, str] | None = None):
        """``wrong``: is given what is found wrong, under "bad" (it differs) or "failed" (the disk), in place of an error; from
        then on every block is 0. So all processes come to the end of a load, and agree there."""
        self.folder, self.manifest, self.wrong = folder, manifest, wrong
        self._files: dict[str, File] = {}
        self._open: dict[str, File] = {}
        """Those of them that are open, the one not used for longest first."""

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
        self._files.clear()

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
        if self.wrong:
            return torch.zeros(tuple(size))
        try:
            return self._block(name, start, size)
        except (OSError, Differs) as error:
            if self.wrong is not None:
                self.wrong["bad" if isinstance(error, Differs) else "failed"] = str(error)
                return torch.zeros(tuple(size))
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
            piece = file.values(key, low, high)
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
        if name not in self._files:
            self._files[name] = File(self.folder / name, self.manifest.facts(name))
        file = self._open.pop(name, self._files[name])
        self._open[name] = file
        if len(self._open) > AT_ONCE:
            self._open.pop(next(iter(self._open))).close()
        return file


def _overlap(
    start: Sequence[int], size: Sequence[int], other: Sequence[int], width: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Where two blocks meet, along each dimension: first and one past the last."""
    for a, n, b, m in zip(start, size, other, width, strict=True):
        yield max(a, b), min(a + n, b + m)
