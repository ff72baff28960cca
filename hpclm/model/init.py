"""Initial weights that do not depend on the layout.

A weight is initialised in bands of rows, each with its own seed. A process generates only the bands that overlap its slice, and never
holds more than the slice and one band. Layers can be built on the meta device: their modules record how to initialise each weight, so
that any slice can be filled later.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpclm.model.weights import Table, Weight
from hpclm.parallel.collectives import copy_to_tp
from hpclm.parallel.main_gradients import accumulated
from hpclm.parallel.mesh import Axis
from hpclm.parallel.placement import Placement, TensorBlock

# part of the meaning of a seed: another size would change every run's initial weights
BAND = 1 << 20  # values


@dataclass(frozen=True)
class InitSpec:
    """How to initialise a weight: N(mean, std) from ``seed``, or ``mean`` everywhere if std is 0."""

    placement: Placement
    mean: float = 0.0
    std: float = 0.0
    seed: int = 0

    @classmethod
    def normal(cls, placement: Placement, std: float, generator: torch.Generator) -> "InitSpec":
        """N(0, std), with a seed taken from ``generator``."""
        # 62 random bits, so that the band seeds of two weights, which count up from here, do not overlap
        return cls(placement, std=std, seed=int(torch.randint(1 << 62, (), generator=generator, device="cpu")))

    @classmethod
    def declared(cls, weight: Weight, generator: torch.Generator | None = None) -> "InitSpec":
        """The initial values of ``weight``; random ones take their seed from ``generator``."""
        if weight.std and generator is not None:
            return cls.normal(weight.placement, weight.std, generator)
        return cls(weight.placement, weight.mean)

    def parameter(self, tp: Axis, device: torch.device | None = None, data_rank: int = 0) -> nn.Parameter:
        """The local slice of the weight, on ``device`` or the current one; not filled on the meta device."""
        local = torch.empty(self.placement.local(tp), device=device)
        if not local.is_meta:
            self.fill(local.view(-1), 0, tp, data_rank)
        return nn.Parameter(local)

    def fill(self, run: Tensor, begin: int, tp: Axis, data_rank: int = 0) -> None:
        """Fill the vector ``run`` with the values of the flattened local slice from index ``begin`` on."""
        if not self.std:
            run.fill_(self.mean)
            return
        end = begin + len(run)
        width = math.prod(self.placement.local(tp)[1:])
        for row, drawn in self._rows(begin // width, -(-end // width), tp, data_rank):
            low = max(begin, row * width)
            high = min(end, (row + len(drawn)) * width)
            run[low - begin : high - begin] = drawn.reshape(-1)[low - row * width : high - row * width]

    def _rows(self, first: int, last: int, tp: Axis, data_rank: int) -> Iterator[tuple[int, Tensor]]:
        """Rows ``first`` to ``last`` of the local slice, a band at a time, with the index of each band's first row."""
        rows = self.placement.shape[0]
        by_rows = self.placement.dim == 0
        count = max(1, BAND // math.prod(self.placement.shape[1:]))
        pieces = list(self.placement.pieces(tp, data_rank))
        # pieces that are not split by rows have the same rows, and differ in columns only
        for group in [[piece] for piece in pieces] if by_rows else [pieces]:
            piece = group[0]
            shift = piece.start[0]  # offset from local rows to rows of the whole weight
            if by_rows:
                shift -= piece.offset
            begin = max(first + shift, piece.start[0])
            end = min(last + shift, piece.start[0] + piece.size[0])
            if begin >= end:
                continue
            for band in range(begin // count, -(-end // count)):
                a = max(begin, band * count)
                b = min(end, rows, (band + 1) * count)
                drawn = self._band(band, min(count, rows - band * count))[a - band * count : b - band * count]
                yield a - shift, self._columns(drawn, group)

    def _band(self, number: int, rows: int) -> Tensor:
        # on the CPU even for weights on a GPU, because a GPU's generator draws other numbers
        generator = torch.Generator().manual_seed(self.seed + number)
        drawn = torch.empty((rows, *self.placement.shape[1:]), device="cpu")
        return drawn.normal_(self.mean, self.std, generator=generator)

    def _columns(self, rows: Tensor, pieces: Sequence[TensorBlock]) -> Tensor:
        """The columns of these whole rows that belong to ``pieces``."""
        shape = self.placement.shape
        cut = []
        for piece in pieces:
            kept = rows
            for dim in range(1, len(shape)):
                if piece.size[dim] < shape[dim]:
                    kept = kept.narrow(dim, piece.start[dim], piece.size[dim])
            cut.append(kept)
        return cut[0] if len(cut) == 1 else torch.cat(cut, self.placement.dim or 0)


class TensorParallelModule(nn.Module):
    """A module that may split its weights over ``tp``, and records how to initialise them."""

    defer_tp_grad_sum = False
    """Whether the engine sums the gradients of replicated weights over ``tp``, once a step."""

    def __init__(self, tp: Axis):
        super().__init__()
        self.tp = tp
        self.placements: dict[str, Placement] = {}
        """How each weight is split."""
        self.init_specs: dict[str, InitSpec] = {}
        self.main_grads: dict[str, Tensor] = {}
        """The fp32 gradients that the backward pass accumulates in place, by the name of the weight."""

    def new_parameter(self, name: str, spec: InitSpec) -> nn.Parameter:
        """The local slice of the weight ``name``; on the meta device, for the engine to fill, if data-parallel ranks split it."""
        self.placements[name] = spec.placement
        self.init_specs[name] = spec
        return spec.parameter(self.tp, torch.device("meta") if spec.placement.data_ranks > 1 else None)

    def declared(self, table: Table, name: str, generator: torch.Generator | None = None) -> nn.Parameter:
        """The local slice of the weight ``name`` of ``table``."""
        return self.new_parameter(name, InitSpec.declared(table.weights[name], generator))

    def optional(self, table: Table, name: str, generator: torch.Generator | None = None) -> nn.Parameter | None:
        """The same; None if the table has no such weight."""
        return self.declared(table, name, generator) if name in table.weights else None

    def new_buffer(self, name: str, values: Tensor | None) -> None:
        """Create the buffer ``name``, which is saved whole with the weights and never updated by an optimizer; None: no buffer."""
        if values is not None:
            self.placements[name] = Placement(tuple(values.shape))
        self.register_buffer(name, values)

    def accumulated(self, name: str) -> Tensor:
        """The weight ``name``; its gradient is accumulated in place if it is in ``main_grads``."""
        parameter: Tensor = getattr(self, name)
        if name in self.main_grads:
            return accumulated(parameter, self.main_grads[name])
        return parameter

    def replicated(self, parameter: Tensor) -> Tensor:
        """A weight that every rank of ``tp`` holds whole and applies to its own slice of the sequence."""
        return parameter if self.defer_tp_grad_sum else copy_to_tp(parameter, self.tp)


def saved_buffers(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a layer that are saved with its weights, by name."""
    for path, module in layer.named_modules():
        if isinstance(module, TensorParallelModule):
            for name, buffer in module.named_buffers(recurse=False):
                if name in module.placements:
                    yield f"{path}.{name}".removeprefix("."), buffer


def uninitialized(layer: nn.Module) -> Iterator[tuple[str, InitSpec]]:
    """The weights of a layer that are still on the meta device, by name, with their initialisation."""
    for path, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                yield f"{path}.{name}".removeprefix("."), module.init_specs[name]


def materialize_on(device: torch.device, tp: Axis, data_rank: int = 0) -> Callable[[Any, nn.Module], nn.Module]:
    """Returns a function that moves a layer to ``device`` and initialises its weights on the meta device."""

    def wrap(_: Any, layer: nn.Module) -> nn.Module:
        for name, spec in list(uninitialized(layer)):
            set_weight(layer, name, spec.parameter(tp, device, data_rank))
        return layer.to(device)

    return wrap


def set_weight(layer: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Replace the weight at the path ``name`` of a layer; the new one is trained if the old one was."""
    path, _, last = name.rpartition(".")
    setattr(layer.get_submodule(path), last, weight.requires_grad_(layer.get_parameter(name).requires_grad))


def move(layer: nn.Module, device: torch.device) -> None:
    """Move a layer to ``device``, except weights on the meta device."""
    for module in layer.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not weight.is_meta and weight.device != device:
                setattr(module, name, nn.Parameter(weight.detach().to(device), weight.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate weights that are on the meta device, unfilled, on ``device``."""
    # to_empty() would drop the values of buffers and of allocated weights
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
