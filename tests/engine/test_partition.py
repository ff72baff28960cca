import itertools
import random

import pytest

from hpclm.base.errors import ConfigError
from hpclm.parallel.partition import balanced


def sums(costs, parts):
    return [sum(costs[i] for i in part) for part in parts]


@pytest.mark.parametrize(
    "costs, stages, ends",
    [
        ([1, 1, 1, 1], 2, [2, 4]),
        ([1] * 10, 4, [2, 4, 7, 10]),
        ([1] * 10, 1, [10]),
        ([8, 1, 1, 1, 1, 8], 3, [1, 5, 6]),
        ([0, 0, 1, 1, 1, 0, 0], 3, [3, 4, 7]),
        ([5, 1], 2, [1, 2]),
    ],
)
def test_the_dearest_stage_is_as_cheap_as_it_can_be(costs, stages, ends):
    parts = balanced(costs, stages)
    best = max(sums(costs, [range(a, b) for a, b in zip([0, *ends], ends)]))
    assert max(sums(costs, parts)) == best
    assert [i for part in parts for i in part] == list(range(len(costs)))
    assert all(parts) and len(parts) == stages


def test_no_other_division_is_better():
    draw = random.Random(0)
    for _ in range(30):
        costs = [draw.choice([0, 1, 2, 5, draw.random()]) for _ in range(draw.randint(3, 8))]
        stages = draw.randint(1, len(costs))
        mine = sums(costs, balanced(costs, stages))
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
            other = sums(costs, [range(a, b) for a, b in zip([0, *cuts], [*cuts, len(costs)])])
            assert max(mine) <= max(other) + 1e-6
            if max(other) <= max(mine) + 1e-9:
                assert sum(x * x for x in mine) <= sum(x * x for x in other) + 1e-6


def test_every_stage_has_one_of_the_layers_that_it_needs():
    costs, needed = [100, 0, 1, 1, 1, 0, 100], [False, False, True, True, True, False, False]
    assert balanced(costs, 3, needed) == [range(0, 3), range(3, 4), range(4, 7)]
    with pytest.raises(ConfigError, match="3 layers cannot be divided over 4 pipeline stages"):
        balanced(costs, 4, needed)
