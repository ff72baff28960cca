"""How a logical tensor is split over the tensor-parallel axis."""

from collections.abc import Iterator
from dataclasses import dataclass

from hpclm.errors import ConfigError
from hpclm.parallel.mesh import Axis


@dataclass(frozen=True)
class Piece:
    """A block of a logical tensor, and its offset in the local tensor."""

    start: tuple[int, ...]
    """Of the block in the whole tensor."""
    size: tuple[int, ...]
    offset: int
    """Of the block along the split dimension of the local tensor."""


@dataclass(frozen=True)
class Placement:
    """Shape of a whole tensor, and how it is split: along ``dim``, in ``parts`` equal blocks that are each split separately."""

    shape: tuple[int, ...]
    dim: int | None = None
    """None: replicated on every process."""
    parts: int = 1
    """2 for the first weight of a gated MLP, whose gate and up blocks are each split over the processes."""

    def local(self, axis: Axis) -> tuple[int, ...]:
        """Shape of the local tensor on one process of ``axis``."""
        if self.dim is None:
            return self.shape
        size = self.shape[self.dim]
        if size % (axis.size * self.parts):
            raise ConfigError(
                f"dimension {self.dim} of a weight of shape {self.shape} is not divisible by parallel.tensor={axis.size}"
            )
        return (*self.shape[: self.dim], size // axis.size, *self.shape[self.dim + 1 :])

    def pieces(self, axis: Axis) -> Iterator[Piece]:
        """The blocks that this process of ``axis`` holds, in order."""
        local = self.local(axis)
        if self.dim is None or axis.size == 1:
            yield Piece((0,) * len(self.shape), self.shape, 0)
            return
        block, width = self.shape[self.dim] // self.parts, local[self.dim] // self.parts
        for part in range(self.parts):
            start, size = [0] * len(self.shape), list(self.shape)
            start[self.dim], size[self.dim] = part * block + axis.rank * width, width
            yield Piece(tuple(start), tuple(size), part * width)
