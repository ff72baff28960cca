"""Checksums of an engine's state, by which ranks find bits that have changed.

The state is divided into runs of CHUNK values or less. A run's checksum is the sum of its bits, read as 64-bit integers that wrap
around, so it is exact, the same in any order, and as fast as memory. It changes with every change of one value. Changes of several
values of a run are missed only if they cancel out.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.state import TrainingState

CHUNK = 1 << 22  # values: what is concatenated stays in the cache of a large GPU


def held(state: TrainingState, weights: Iterable[ShardedParameter]) -> Iterator[Tensor]:
    """This process's values of ``weights``, and of the optimizer's tensors of them."""
    for weight in weights:
        yield state.values(weight)
        yield from (state.values(weight, name) for name in state.names(weight))


def checksums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The checksum of each run of fp32 ``tensors``, int64 scalars; queued on the device, which nothing waits for."""
    sums: list[Tensor] = []
    small: list[Tensor] = []
    count = 0
    for tensor in tensors:
        for run in tensor.detach().reshape(-1).view(torch.int32).split(CHUNK):
            if len(run) == CHUNK and run.storage_offset() % 2 == 0:
                sums.append(run.view(torch.int64).sum())
                continue
            if small and (count + len(run) > CHUNK or run.device != small[0].device):
                sums.append(_sum(small, count))
                small, count = [], 0
            small.append(run)
            count += len(run)
    return [*sums, _sum(small, count)] if small else sums


def _sum(runs: list[Tensor], count: int) -> Tensor:
    """The checksum of several runs together, of ``count`` values."""
    padding = [runs[0].new_zeros(1)] if count % 2 else []
    return torch.cat([*runs, *padding]).view(torch.int64).sum()
