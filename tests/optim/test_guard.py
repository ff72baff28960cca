import math

import pytest

from hpclm.config import OptimConfig
from hpclm.errors import DivergedError
from hpclm.optim.guard import Guard


def test_a_loss_scale_may_search_but_not_for_ever():
    guard = Guard(OptimConfig(nonfinite_limit=3))
    for step in range(100):
        guard.check(step, 2.0, math.inf, True, searching=True)
    assert guard.skipped == 100
    with pytest.raises(DivergedError, match="3 steps in a row"):
        for step in range(3):
            guard.check(step, 2.0, math.nan, True, searching=False)  # the scale is at its minimum


def test_a_good_step_starts_the_count_anew():
    guard = Guard(OptimConfig(nonfinite_limit=2))
    for skipped in (True, False, True, False, True):
        guard.check(1, math.nan if skipped else 1.0, 1.0, skipped, searching=False)
    assert guard.skipped == 3


def test_stop_means_the_first_one():
    with pytest.raises(DivergedError, match=r"optim\.nonfinite=stop"):
        Guard(OptimConfig(nonfinite="stop")).check(5, math.nan, 1.0, True, searching=False)
