"""Initial weights that do not depend on how the model is laid out over processes.

A weight is drawn in bands of rows, each from a seed of its own, so that a process draws only the bands it has a part of and
never holds more than its part and one band.
"""

import math

import torch
from torch import Tensor, nn

from hpclm.parallel.form import Form
from hpclm.parallel.mesh import ALONE, Axis

BAND = 1 << 20  # values


def normal(form: Form, std: float, generator: torch.Generator, tp: Axis = ALONE) -> nn.Parameter:
    """This process's part of a weight drawn from N(0, std); the weight follows from ``generator`` and its shape.

    Nothing is drawn where new tensors have a shape only (``with torch.device("meta")``).
    """
    seed = int(torch.randint(1 << 62, (), generator=generator, device="cpu"))
    part = torch.empty(form.local(tp))
    if part.is_meta:
        return nn.Parameter(part)
    rows, width = form.shape[0], form.shape[1:]
    count = max(1, BAND // math.prod(width))
    for piece in form.pieces(tp):
        target = form.cut(part, piece)
        first, last = piece.start[0], piece.start[0] + piece.size[0]
        columns = (slice(None), *(slice(a, a + n) for a, n in zip(piece.start[1:], piece.size[1:], strict=True)))
        for band in range(first // count, -(-last // count)):
            begin, end = band * count, min(rows, (band + 1) * count)
            drawn = _band(seed + band, (end - begin, *width), std)
            low, high = max(begin, first), min(end, last)
            target[low - first : high - first] = drawn[low - begin : high - begin][columns]
    return nn.Parameter(part)


def _band(seed: int, shape: tuple[int, ...], std: float) -> Tensor:
    return torch.empty(shape).normal_(std=std, generator=torch.Generator().manual_seed(seed))
