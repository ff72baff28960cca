"""How a logical tensor is split: over the tensor-parallel ranks, and over the data-parallel ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpclm.base.errors import ConfigError

if TYPE_CHECKING:  # it needs PyTorch
    from hpclm.parallel.mesh import Axis

Use = Literal["hidden", "embedding", "output"]


@dataclass(frozen=True)
class TensorBlock:
    """A block of a logical tensor, and its offset in the local tensor."""

    start: tuple[int, ...]
    """Offset of the block in the whole tensor."""
    size: tuple[int, ...]
    offset: int
    """Offset of the block along the dimension of the local tensor that tensor-parallel ranks split."""


@dataclass(frozen=True)
class Fused:
    """The matrices that a weight fuses, one after the other: ``groups`` times the same sequence of ``rows``."""

    groups: int
    """1: tensor-parallel ranks split each matrix. More: they divide the groups."""
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Shape of a whole tensor, and how it is split.

    Tensor-parallel ranks split it along ``dim``. Each of ``data_ranks`` consecutive data-parallel ranks holds an equal block along
    ``data_dim``, as with experts; the next ``data_ranks`` hold the same blocks again.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    """None: replicated on every tensor-parallel rank."""
    fused: Fused | None = None
    """Matrices that it fuses along ``dim``, or along its rows if ``dim`` is None; such as the gate and up of a gated MLP."""
    data_dim: int = 0
    """A dimension other than ``dim``."""
    data_ranks: int = 1
    """1: every data-parallel rank holds all of it."""
    stacked: bool = False
    """Whether it is a stack of separate weights along its first dimension, such as those of experts."""
    use: Use = "hidden"
    """embedding: its rows are looked up by token or position. output: it computes the logits. hidden: every other weight."""

    def __post_init__(self) -> None:
        if self.data_ranks > 1 and (self.data_dim == self.dim or self.shape[self.data_dim] % self.data_ranks):
            raise ConfigError(
                f"dimension {self.data_dim} of a weight of shape {self.shape} cannot be split over {self.data_ranks} data-parallel ranks: "
                "its size must be divisible by their number, and it must not be the dimension that tensor-parallel ranks split"
            )

    @property
    def dimensions(self) -> int:
        """2 for a matrix, 1 for a bias or norm; for a stack, the dimensions of one weight in it."""
        return len(self.shape) - self.stacked

    def local(self, tp: "Axis") -> tuple[int, ...]:
        """Shape of the local tensor on each process of ``tp``."""
        local = list(self.shape)
        if self.data_ranks > 1:
            local[self.data_dim] //= self.data_ranks
        if self.dim is None:
            return tuple(local)
        if any(part % tp.size for part in self.parts):
            raise ConfigError(
                f"dimension {self.dim} of a weight of shape {self.shape} is not divisible by parallel.tensor={tp.size}"
            )
        local[self.dim] = self.shape[self.dim] // tp.size
        return tuple(local)

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of the blocks along ``dim`` that are each split over the tensor-parallel ranks."""
        if self.dim is None:
            return ()
        return self.fused.rows if self.fused and self.fused.groups == 1 else (self.shape[self.dim],)

    def pieces(self, tp: "Axis", data_rank: int = 0) -> Iterator[TensorBlock]:
        """The blocks that this process of ``tp`` holds, in order. ``data_rank``: its rank on the data axis."""
        local = self.local(tp)
        start = [0] * len(self.shape)
        size = list(self.shape)
        if self.data_ranks > 1:
            size[self.data_dim] = local[self.data_dim]
            start[self.data_dim] = data_rank % self.data_ranks * local[self.data_dim]
        if self.dim is None or tp.size == 1:
            yield TensorBlock(tuple(start), tuple(size), 0)
            return
        done = 0
        # [its rows of the gate; its rows of up], like Megatron-LM's gated fc1: one cut through the middle would give
        # one rank all gates
        for part in self.parts:
            width = part // tp.size
            start[self.dim] = done + tp.rank * width
            size[self.dim] = width
            yield TensorBlock(tuple(start), tuple(size), done // tp.size)
            done += part
