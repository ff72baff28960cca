import math

import pytest

from hpclm.base.errors import DivergedError
from hpclm.config import OptimConfig
from hpclm.optim.stability import NonfiniteGuard


def step(guard, number, loss, norm, skipped, searching):
    guard.observe(number, loss, skipped, searching)
    guard.check(number, loss, norm, skipped, searching)


def test_a_loss_scale_may_search_but_not_for_ever():
    guard = NonfiniteGuard(OptimConfig(nonfinite_limit=3))
    for number in range(100):
        step(guard, number, 2.0, math.inf, True, searching=True)
    assert guard.skipped == 100
    with pytest.raises(DivergedError, match="3 steps in a row"):
        for number in range(3):
            step(guard, number, 2.0, math.nan, True, searching=False)  # the scale is at its minimum


def test_a_good_step_starts_the_count_anew():
    guard = NonfiniteGuard(OptimConfig(nonfinite_limit=2))
    for skipped in (True, False, True, False, True):
        step(guard, 1, math.nan if skipped else 1.0, 1.0, skipped, searching=False)
    assert guard.skipped == 3


def test_a_limit_of_one_stops_at_the_first():
    with pytest.raises(DivergedError, match=r"1 step was not finite \(optim\.nonfinite_limit\)"):
        step(NonfiniteGuard(OptimConfig(nonfinite_limit=1)), 5, math.nan, 1.0, True, searching=False)


def test_steps_skipped_in_a_row_are_counted_over_attempts():
    first = NonfiniteGuard(OptimConfig(nonfinite_limit=5))
    for number in range(1, 4):
        step(first, number, 2.0, math.inf, True, searching=False)
    second = NonfiniteGuard(OptimConfig(nonfinite_limit=5), first.skipped, first.health)
    step(second, 4, 2.0, math.inf, True, searching=False)
    with pytest.raises(DivergedError, match="5 steps in a row"):
        step(second, 5, 2.0, math.inf, True, searching=False)


@pytest.mark.parametrize("limit, skipped, ends", [(1000, 79, True), (1000, 20, True), (1000, 19, False), (3, 2, False)])
def test_a_run_does_not_end_well_after_many_skipped_steps_whatever_its_policy(limit, skipped, ends):
    guard = NonfiniteGuard(OptimConfig(nonfinite_limit=limit))
    for number in range(1, skipped + 1):
        step(guard, number, 2.0, math.inf, True, searching=False)
    if not ends:
        return guard.check_end(skipped)
    with pytest.raises(
        DivergedError, match=rf"the run ends at step {skipped}, and its last {skipped} steps were skipped"
    ):
        guard.check_end(skipped)


@pytest.mark.parametrize(
    "held_out, skipped, ends", [([None], 1, True), ([2.0, math.nan], 1, True), ([None], 0, False), ([2.0], 1, False)]
)
def test_a_skipped_last_step_is_enough_where_held_out_data_has_no_finite_loss(held_out, skipped, ends):
    guard = NonfiniteGuard(OptimConfig())
    for number in range(1, skipped + 1):
        step(guard, number, math.nan, math.nan, True, searching=False)
    if not ends:
        return guard.check_end(skipped, held_out)
    with pytest.raises(DivergedError, match="the loss on held-out data is not finite either"):
        guard.check_end(skipped, held_out)


def test_what_is_skipped_is_told_with_its_figures(caplog):
    guard = NonfiniteGuard(OptimConfig(nonfinite_limit=3), skipped=4)
    with caplog.at_level("INFO"):
        step(guard, 8, 2.0, math.inf, True, searching=True)
        step(
            guard, 9, math.nan, math.inf, True, searching=True
        )  # a loss that is not finite has nothing to do with the scale
    assert caplog.messages == [
        "step 8 skipped: fp16 overflow, the loss scale adapts",
        "step 9: loss nan, gradient norm inf; skipped, 6 so far",
    ]
    assert guard.in_a_row == 1


def test_a_spike_is_told_when_it_begins_and_when_it_ends(caplog):
    guard = NonfiniteGuard(OptimConfig())
    with caplog.at_level("INFO"):
        for number, loss in enumerate([3.4] * 20 + [666.0] * 5 + [3.4] * 5, 1):
            step(guard, number, loss, 1.0, False, searching=False)
    first, last = caplog.messages
    assert first.startswith("loss spike since step 21: 666, usually 3.4; until the loss recovers")
    assert last == "step 26: the loss has recovered to 3.4; the spike began at step 21"
