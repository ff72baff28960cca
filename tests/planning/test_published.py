"""The formulas against published runs. The limits are of medians over all rows that have the figure."""

from statistics import median

import pytest

from hpclm.planning import memory, time
from tests.planning.published import rows

GIB = 2**30


def gib(row):
    return max(part.total for part in memory.each(row.model, row.layout, row.code)) / GIB


def ratio(row, efficiency=None):
    """Predicted speed over the measured one."""
    step = time.step(row.model, row.layout, row.code, row.kind, efficiency)
    samples = row.layout.micro_size * row.layout.accumulation * row.layout.data
    return samples * row.model.context / step.total / row.layout.gpus / row.tokens_per_second


def fitted(some):
    """The efficiency at which as many rows are predicted too fast as too slow."""
    low, high = 0.1, 1.5
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if median(ratio(row, middle) for row in some) < 1 else (low, middle)
    return low


def test_memory_is_right_to_a_tenth():
    told = [row for row in rows() if row.gib and row.gib < float("inf")]
    assert len(told) == 74
    assert median(abs(gib(row) / row.gib - 1) for row in told) < 0.06


def test_what_did_not_fit_is_said_not_to():
    failed = [row for row in rows() if row.gib == float("inf")]
    assert len(failed) == 2
    assert all(gib(row) > row.kind.memory for row in failed), [gib(row) for row in failed]


def test_most_of_what_ran_is_said_to_fit_and_the_rest_misses_by_little():
    ran = [row for row in rows() if row.tokens_per_second]
    over = [gib(row) / row.kind.memory - 1 for row in ran if gib(row) > row.kind.memory]
    assert len(over) < 0.12 * len(ran)
    assert max(over) < 0.15


def test_speed_is_right_to_a_tenth_after_one_constant_a_generation():
    told = [row for row in rows() if row.tokens_per_second]
    assert len(told) == 285
    assert median(abs(ratio(row) - 1) for row in told) < 0.10


@pytest.mark.parametrize("family", time.EFFICIENCY)
def test_the_constants_are_those_that_the_runs_give(family):
    mine = [row for row in rows() if row.tokens_per_second and row.kind.family == family]
    assert fitted(mine) == pytest.approx(time.EFFICIENCY[family], rel=0.02)
    assert median(abs(ratio(row) - 1) for row in mine) < 0.10


@pytest.mark.parametrize("family", time.EFFICIENCY)
def test_a_constant_of_half_the_runs_serves_for_the_other_half(family):
    mine = [row for row in rows() if row.tokens_per_second and row.kind.family == family]
    constant = fitted(mine[::2])
    assert median(abs(ratio(row, constant) - 1) for row in mine[1::2]) < 0.10
