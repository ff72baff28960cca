"""First values of weights, for any part of a weight at any time, whatever the layout over processes.

A weight is drawn in bands of rows, each from a seed of its own, so that a process draws only the bands it has a part of and
never holds more than its part and one band. A layer that is built on the meta device has shapes only; what its modules
remember is enough to fill a part of it later.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpclm.parallel.form import Form
from hpclm.parallel.mesh import Axis

BAND = 1 << 20  # values


@dataclass(frozen=True)
class Initial:
    """The first values of a weight: N(mean, std) from ``seed``, or ``mean`` everywhere."""

    form: Form
    mean: float = 0.0
    std: float = 0.0
    seed: int = 0

    @classmethod
    def normal(cls, form: Form, std: float, generator: torch.Generator) -> "Initial":
        """Values from N(0, std) that follow from the state of ``generator``."""
        return cls(form, std=std, seed=int(torch.randint(1 << 62, (), generator=generator, device="cpu")))

    def parameter(self, tp: Axis, device: torch.device | None = None) -> nn.Parameter:
        """What this process of ``tp`` holds of the weight, on ``device`` or the current one; on meta only its shape."""
        part = torch.empty(self.form.local(tp), device=device)
        if not part.is_meta:
            self.fill(part.view(-1), 0, tp)
        return nn.Parameter(part)

    def fill(self, run: Tensor, begin: int, tp: Axis) -> None:
        """Write to the vector ``run`` what this process of ``tp`` holds, row by row, from its value number ``begin`` on."""
        if not self.std:
            run.fill_(self.mean)
            return
        end, width = begin + len(run), math.prod(self.form.local(tp)[1:])
        for row, drawn in self._rows(begin // width, -(-end // width), tp):
            low, high = max(begin, row * width), min(end, (row + len(drawn)) * width)
            run[low - begin : high - begin] = drawn.reshape(-1)[low - row * width : high - row * width]

    def _rows(self, first: int, last: int, tp: Axis) -> Iterator[tuple[int, Tensor]]:
        """Rows ``first`` to ``last`` of what this process holds, a band at a time, and the number of each band's first."""
        rows = self.form.shape[0]
        count = max(1, BAND // math.prod(self.form.shape[1:]))
        pieces = list(self.form.pieces(tp))
        split = pieces if self.form.dim == 0 else pieces[:1]  # others differ in columns only
        for piece in split:
            shift = piece.start[0] - (piece.offset if self.form.dim == 0 else 0)  # from our rows to those of the whole
            begin, end = max(first + shift, piece.start[0]), min(last + shift, piece.start[0] + piece.size[0])
            for band in range(begin // count, -(-end // count) if begin < end else 0):
                a, b = max(begin, band * count), min(end, rows, (band + 1) * count)
                drawn = self._band(band, min(count, rows - band * count))[a - band * count : b - band * count]
                yield a - shift, drawn if self.form.dim == 0 else self._columns(drawn, tp)

    def _band(self, number: int, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + number)
        drawn = torch.empty((rows, *self.form.shape[1:]), device="cpu")
        return drawn.normal_(self.mean, self.std, generator=generator)

    def _columns(self, rows: Tensor, tp: Axis) -> Tensor:
        """Of whole rows, what this process holds."""
        dim = self.form.dim
        if dim is None or tp.size == 1:
            return rows
        cut = [rows.narrow(dim, piece.start[dim], piece.size[dim]) for piece in self.form.pieces(tp)]
        return cut[0] if len(cut) == 1 else torch.cat(cut, dim)


class Part(nn.Module):
    """A layer of which this process of ``tp`` holds a part, and which knows its weights' first values."""

    def __init__(self, tp: Axis):
        super().__init__()
        self.tp = tp
        self.forms: dict[str, Form] = {}
        """How each weight lies on the tensor axis."""
        self.initial: dict[str, Initial] = {}

    def held(self, name: str, initial: Initial) -> nn.Parameter:
        """This process's part of the weight ``name``."""
        self.forms[name], self.initial[name] = initial.form, initial
        return initial.parameter(self.tp)


def shapes(layer: nn.Module) -> Iterator[tuple[str, Initial]]:
    """The weights of a layer that are shapes only, by name, with the values they are to have."""
    for path, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                yield f"{path}.{name}" if path else name, module.initial[name]


def on(device: torch.device, tp: Axis) -> Callable[[str, nn.Module], nn.Module]:
    """Puts a layer on ``device``; weights that are shapes only get their values there."""

    def place(_: str, layer: nn.Module) -> nn.Module:
        for name, initial in list(shapes(layer)):
            path, _, last = name.rpartition(".")
            setattr(layer.get_submodule(path), last, initial.parameter(tp, device))
        return layer.to(device)

    return place


def move(layer: nn.Module, device: torch.device, make: bool = False) -> None:
    """Put on ``device`` what is more than a shape; with ``make``, give shapes memory there, of no particular values."""

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=device) if make else tensor
        return tensor.to(device)

    layer._apply(moved)  # to_empty() would forget the values of buffers, and of weights that have them
