"""Checksums of an engine's state, by which ranks find bits that have changed.

The state is divided into pieces. The checksum of one is the sum of its bits, read as 64-bit integers that wrap around, so it is
exact, the same in any order, and as fast as memory. It changes with every change of one value. Changes of several values of a piece
are missed only if they cancel out.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hpclm.config.optimizers import Where
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.state import TrainingState

MIN_PIECE_VALUES = 1 << 18  # values from which a tensor is a piece by itself; smaller ones are concatenated


def local_tensors(state: TrainingState, weights: Iterable[ShardedParameter], shared: bool) -> Iterator[Tensor]:
    """This process's values of ``weights``, and of the optimizer's tensors of them. ``shared``: without what only the process that works
    on a matrix keeps."""
    places: Sequence[Where] = ("weight", "everywhere") if shared else ("weight", "everywhere", "matrix")
    for weight in weights:
        yield state.values(weight)
        yield from (state.values(weight, name) for where in places for name in state.names(weight, where))


def counts(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The step counts that an optimizer keeps as fp32 tensors, one for each parameter."""
    for entry in optimizer.state.values():
        if isinstance(step := entry.get("step"), Tensor):
            yield step


def pieces(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The pieces that fp32 ``tensors`` are divided into, each as views of the tensors: an int64 one, or int32 ones that are to be
    concatenated."""
    divided: list[list[Tensor]] = []
    small: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        bits = tensor.detach().view(-1).view(torch.int32)
        # 64-bit words need an even number of 32-bit ones, the first of them at a multiple of 8 bytes
        even = len(bits) // 2 * 2 if len(bits) >= MIN_PIECE_VALUES and bits.storage_offset() % 2 == 0 else 0
        if even:
            divided.append([bits[:even].view(torch.int64)])
        small.setdefault(bits.device, []).extend(part for part in bits[even:].split(MIN_PIECE_VALUES) if len(part))
    for parts in small.values():
        begin, count = 0, 0
        for end, part in enumerate(parts, 1):
            count += len(part)
            if count >= MIN_PIECE_VALUES or end == len(parts):
                divided.append(parts[begin:end] + [part.new_zeros(1)] * (count % 2))
                begin, count = end, 0
    return divided


def checksums(divided: Iterable[list[Tensor]], device: torch.device) -> Tensor:
    """[pieces] int64: the checksum of each, on ``device``; queued there, and nothing waits."""
    sums = [
        (piece[0] if piece[0].dtype == torch.int64 else torch.cat(piece).view(torch.int64)).sum().to(device)
        for piece in divided
    ]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)
