"""When a loss counts as a spike, on losses of real runs and on made-up ones."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hpclm.config import OptimConfig
from hpclm.optim.stability import FACTOR, MIN_STEPS, Health, Watch

RISE = OptimConfig.spike
CURVES = json.loads((Path(__file__).parent / "curves.json").read_text())


def after(losses, watch=None, first=1):
    for step, loss in enumerate(losses, first):
        watch = (watch or Watch(RISE)).after(step, loss, skipped=False)
    return watch


def alarms(losses):
    watch, found = Watch(RISE), []
    for step, loss in enumerate(losses, 1):
        watch = watch.after(step, loss, skipped=False)
        found += [step] if watch.health.spiking_since else []
    return found


@pytest.mark.parametrize("name", CURVES)
def test_no_step_of_an_ordinary_run_is_a_spike_and_one_in_it_is_found_at_once(name):
    losses = CURVES[name]
    assert not alarms(losses)
    for step in range(MIN_STEPS + 1, len(losses) - 2, 7):
        spoilt = [*losses[:step], losses[step] + 100.0, *losses[step + 1 :]]
        assert alarms(spoilt) == [step + 1], step


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.02, 0.3, 1.0])
def test_no_step_of_a_noisy_falling_loss_is_a_spike(noise, seed):
    draw = np.random.default_rng(seed)
    steps = np.arange(1500)
    falling = 2.5 + 8.5 * np.exp(-steps / draw.uniform(20, 400)) + draw.standard_t(6, len(steps)) * noise
    assert not alarms(falling.clip(0.01).tolist())


def test_a_spike_lasts_until_the_loss_is_back_however_long_that_takes():
    watch = after([3.4, 3.5, 3.3] * 5)
    assert watch.health.good and watch.health.usual == pytest.approx(3.4)
    watch = after([666.0] * 500, watch, first=16)
    assert watch.health.spiking_since == 16 and not watch.health.good and watch.health.usual == pytest.approx(3.4)
    assert watch.health.describe() == "loss spike since step 16: 666, usually 3.4"
    assert watch.health.row() == {"spiking_since": 16}
    watch = after([3.6], watch, first=516)
    assert watch.health.good and watch.health.describe() == "" and watch.health.row() == {}


@pytest.mark.parametrize("loss, spike", [(3.4 + 0.49, False), (3.4 + 0.51, True), (2.0, False), (math.nan, False)])
def test_a_loss_must_rise_by_half_a_nat(loss, spike):
    watch = after([3.39, 3.4, 3.41] * 10)
    assert (watch.after(31, loss, skipped=False).health.spiking_since is not None) == spike


def test_a_loss_must_rise_by_more_than_it_usually_moves():
    noisy = [3.0, 3.4, 3.8] * 10
    deviation = after(noisy).health.deviation
    assert not alarms([*noisy, 3.4 + 0.9 * FACTOR * deviation]) and alarms([*noisy, 3.4 + 1.1 * FACTOR * deviation])


def test_nothing_is_judged_before_enough_is_known_or_where_it_is_not_wanted():
    assert not alarms([3.4] * (MIN_STEPS - 1) + [666.0]) and alarms([3.4] * MIN_STEPS + [666.0])
    watch = Watch(0.0)
    for step, loss in enumerate([3.4] * 50 + [666.0], 1):
        watch = watch.after(step, loss, skipped=False)
    assert watch.health.good


def test_a_run_that_goes_on_knows_what_was_usual():
    saved = json.loads(json.dumps(vars(after([3.4, 3.5, 3.3] * 5).health)))
    watch = Watch(RISE, Health.of(saved))
    assert watch.health == after([3.4, 3.5, 3.3] * 5).health
    assert watch.after(16, 50.0, skipped=False).health.spiking_since == 16


def test_skipped_steps_are_counted_until_one_is_not():
    watch = after([3.4] * 10)
    for step in range(11, 14):
        watch = watch.after(step, math.nan, skipped=True)
    assert watch.health.skipped_in_a_row == 3 and not watch.health.good
    assert watch.health.describe() == "the last 3 steps were skipped"
    assert watch.after(14, 3.4, skipped=False).health.good


def test_a_spike_that_is_not_finite_and_the_steps_that_it_costs_are_told():
    health = Health(None, 3.4, 0.1, 16, 1)
    assert health.describe() == "loss spike since step 16: not finite, usually 3.4; the last step was skipped"
    assert Health(5.0, spiking_since=2).describe() == "loss spike since step 2: 5"


def test_the_usual_loss_is_the_median_of_the_last_hundred_steps():
    watch = after([1.0] * 50 + [1.25] * 51)
    assert (watch.health.usual, watch.health.deviation, len(watch.recent)) == (1.25, 0.0, 100)
    watch = after([float(loss) for loss in range(1, 10)])
    assert watch.health.usual == 5.0 and watch.health.deviation == pytest.approx(1.4826 * 2.0)


@pytest.mark.parametrize("said", [None, [], "x", {"loss": "x", "spiking_since": -1}, {"loss": 1e400, "usual": True}])
def test_what_a_checkpoint_says_in_no_sense_is_nothing(said):
    assert Health.of(said) == Health()
