"""Checksums of an engine's state, to detect changed bits.

The state is divided into pieces. The checksum of a piece is the sum of its bits, read as 64-bit integers that wrap around. So it is
exact, independent of order, and limited only by memory bandwidth. A change of one value always changes it; changes of several values are
missed only if they cancel out.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hpclm.engine.base import BaseEngine
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.state import Where

MIN_PIECE_VALUES = 1 << 18  # a tensor of this size or more is a separate piece; smaller ones are concatenated


def local_tensors(engine: BaseEngine, weights: Iterable[ShardedParameter], shared: bool) -> Iterator[Tensor]:
    """This process's values of ``weights``, their optimizer tensors and averages. ``shared``: omit tensors that only one process keeps."""
    places: Sequence[Where] = ("weight", "everywhere") if shared else ("weight", "everywhere", "matrix")
    state = engine.state
    averages = engine.average.averages if engine.average else {}
    for weight in weights:
        yield state.values(weight)
        yield from (state.values(weight, name) for where in places for name in state.names(weight, where))
        if weight.name in averages:
            yield averages[weight.name]


def counts(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The optimizer's step counts that are fp32 tensors, one for each parameter."""
    for entry in optimizer.state.values():
        step = entry.get("step")
        if isinstance(step, Tensor):
            yield step


def pieces(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divide fp32 ``tensors`` into pieces, lists of views: one int64 view, or int32 views to be concatenated."""
    divided: list[list[Tensor]] = []
    small: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        bits = tensor.detach().view(-1).view(torch.int32)
        # 64-bit words need an even number of 32-bit values, the first aligned to 8 bytes
        even = 0
        if len(bits) >= MIN_PIECE_VALUES and bits.storage_offset() % 2 == 0:
            even = len(bits) // 2 * 2
            divided.append([bits[:even].view(torch.int64)])
        small.setdefault(bits.device, []).extend(part for part in bits[even:].split(MIN_PIECE_VALUES) if len(part))
    for parts in small.values():
        begin = 0
        count = 0
        for end, part in enumerate(parts, 1):
            count += len(part)
            if count >= MIN_PIECE_VALUES or end == len(parts):
                divided.append(parts[begin:end] + [part.new_zeros(1)] * (count % 2))
                begin = end
                count = 0
    return divided


def checksums(divided: Iterable[list[Tensor]], device: torch.device) -> Tensor:
    """[pieces] int64: the checksum of each piece, queued on ``device`` without waiting."""
    sums = []
    for piece in divided:
        bits = piece[0]
        if bits.dtype != torch.int64:
            bits = torch.cat(piece).view(torch.int64)
        sums.append(bits.sum().to(device))
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)
