"""Divides layers into pipeline stages of nearly equal cost; needs no PyTorch."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from hpclm.base.errors import ConfigError


def balanced(costs: Sequence[float], stages: int, needed: Sequence[bool] | None = None) -> list[range]:
    """The layers of each stage: minimises the cost of the most expensive stage, then makes the others as even as possible.

    ``costs``: of each layer, in order. ``needed``: each stage has at least one of these layers; all layers by default.
    """
    counts = [True] * len(costs) if needed is None else list(needed)
    if not 1 <= stages <= sum(counts):
        raise ConfigError(
            f"{sum(counts)} layers cannot be divided over {stages} pipeline stages; each stage needs at least one"
        )
    total = [0.0, *accumulate(map(float, costs))]
    seen = [0, *accumulate(counts)]

    def cost(first: int, end: int) -> float:
        # a stage without a needed layer has infinite cost, so it is never chosen
        return total[end] - total[first] if seen[end] > seen[first] else math.inf

    greatest, _ = _divided(len(costs), stages, cost, max)
    limit = greatest * (1 + 1e-9)  # sums of fractions are not exact

    # the slowest stage sets the pace; among divisions with equal pace, the least sum of squares is the most even
    def square(first: int, end: int) -> float:
        value = cost(first, end)
        return value * value if value <= limit else math.inf

    return _divided(len(costs), stages, square, lambda a, b: a + b)[1]


def _divided(
    layers: int, stages: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[range]]:
    """The division that minimises the stages' ``cost(first, end)``, combined by ``join``: dynamic programming."""
    best = [0.0, *[math.inf] * layers]  # best[n]: of the first n layers, in the stages considered so far
    cuts: list[list[int]] = []
    for _ in range(stages):
        totals = [math.inf] * (layers + 1)
        cut = [0] * (layers + 1)
        for end in range(1, layers + 1):
            for first in range(end):
                value = join(best[first], cost(first, end))
                if value < totals[end]:
                    totals[end], cut[end] = value, first
        best = totals
        cuts.append(cut)
    ranges = []
    end = layers
    for cut in reversed(cuts):
        ranges.append(range(cut[end], end))
        end = cut[end]
    return best[layers], ranges[::-1]
