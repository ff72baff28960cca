"""Divides layers into pipeline stages of nearly equal cost; needs no PyTorch."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from hpclm.base.errors import ConfigError


def balanced(costs: Sequence[float], stages: int, needed: Sequence[bool] | None = None) -> list[range]:
    """The layers of each stage: minimises the cost of the most expensive stage, then makes the others as even as possible.

    ``costs``: the cost of each layer, in order. ``needed``: which layers count towards the one that every stage must have; default: all.
    """
    counts = needed or [True] * len(costs)
    if not 1 <= stages <= sum(counts):
        raise ConfigError(
            f"{sum(counts)} layers cannot be divided over {stages} pipeline stages; each stage needs at least one"
        )
    total = [0.0, *accumulate(map(float, costs))]
    seen = [0, *accumulate(counts)]

    def cost(first: int, end: int) -> float:
        if seen[end] == seen[first]:
            return math.inf  # never choose a stage without a needed layer
        return total[end] - total[first]

    greatest, _ = _divided(len(costs), stages, cost, max)
    limit = greatest * (1 + 1e-9)  # sums of fractions are not exact

    # the slowest stage sets the pace; among divisions with equal pace, the least sum of squares is the most even
    def square(first: int, end: int) -> float:
        value = cost(first, end)
        if value > limit:
            return math.inf
        return value * value

    return _divided(len(costs), stages, square, lambda a, b: a + b)[1]


def _divided(
    layers: int, stages: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[range]]:
    """The division that minimises the stages' ``cost(first, end)``, combined by ``join``: dynamic programming."""
    best = [0.0, *[math.inf] * layers]  # best[n]: cost of the first n layers in the stages considered so far
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
