"""How a logical tensor lies on the tensor axis: which part of the whole a process holds."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from hpclm.errors import ConfigError
from hpclm.parallel.mesh import Axis


@dataclass(frozen=True)
class Piece:
    """A block of a logical tensor, and where it lies in what a process holds."""

    start: tuple[int, ...]
    """Of the block in the whole."""
    size: tuple[int, ...]
    offset: int
    """Of the block along the split dimension in the part."""


@dataclass(frozen=True)
class Form:
    """Shape of a whole tensor, and how processes split it: along ``dim``, each of ``parts`` equal blocks for itself."""

    shape: tuple[int, ...]
    dim: int | None = None
    """None: every process holds the whole."""
    parts: int = 1
    """A gated MLP's first weight is two blocks, gate and up, of which each process has its share."""

    def local(self, axis: Axis) -> tuple[int, ...]:
        """Shape of what one process of ``axis`` holds."""
        if self.dim is None:
            return self.shape
        size = self.shape[self.dim]
        if size % (axis.size * self.parts):
            raise ConfigError(
                f"dimension {self.dim} of a weight {self.shape} does not divide by parallel.tensor={axis.size}"
            )
        return (*self.shape[: self.dim], size // axis.size, *self.shape[self.dim + 1 :])

    def pieces(self, axis: Axis) -> Iterator[Piece]:
        """The blocks that this process of ``axis`` holds, in their order."""
        local = self.local(axis)
        if self.dim is None or axis.size == 1:
            yield Piece((0,) * len(self.shape), self.shape, 0)
            return
        block, width = self.shape[self.dim] // self.parts, local[self.dim] // self.parts
        for part in range(self.parts):
            start, size = [0] * len(self.shape), list(self.shape)
            start[self.dim], size[self.dim] = part * block + axis.rank * width, width
            yield Piece(tuple(start), tuple(size), part * width)

    def cut(self, tensor: Tensor, piece: Piece) -> Tensor:
        """The view of ``piece`` in this process's part ``tensor``."""
        return tensor if self.dim is None else tensor.narrow(self.dim, piece.offset, piece.size[self.dim])
