import json
import math

import pytest

from hpclm.config import OptimConfig, Plan, ScalerConfig, from_cli
from hpclm.config.plan import Rampup
from hpclm.optim.schedules import learning_rate
from hpclm.optim.stability import LossScale
from tests.shared import shared

DSE = dict(lr=1.5e-4, min_lr=1e-5, warmup_fraction=0.01, schedule_length=1000, warmup_start=0.0)
MEGATRON = dict(lr=1.5e-4, min_lr=1e-5, warmup=80, schedule_length=8000, warmup_start=0.0, unit="samples")
COSINE = dict(lr=1.5e-4, min_lr=1e-5, warmup=3200, warmup_start=1e-5, schedule="fairseq_cosine", period=96800)
POLYNOMIAL = dict(lr=1e-4, warmup=5, warmup_start=0.0, schedule="fairseq_polynomial")
PEERS = {
    "dse_v1.1.5_cosine_warmup.01_1000": (1, dict(DSE, schedule="megatron1_cosine")),
    "dse_v1.1.5_linear_warmup.01_1000": (1, dict(DSE, schedule="megatron1_linear")),
    "dse_v1.1.5_exponential_warmup.01_1000": (1, dict(DSE, schedule="megatron1_exponential")),
    "dse_v1.1.5_constant_warmup.01_1000": (1, dict(DSE, schedule="constant")),
    "seed2_script_iters_0_500": (1, dict(DSE, schedule_length=320_000, schedule="megatron1_cosine")),
    "megatron2_cosine_warm80_decay8000_inc8": (8, dict(MEGATRON, schedule="cosine")),
    "megatron2_linear_warm80_decay8000_inc8": (8, dict(MEGATRON, schedule="linear")),
    "megatron2_constant_warm80_decay8000_inc8": (8, dict(MEGATRON, schedule="constant")),
    "fairseq_cosine_seed1": (1, dict(COSINE, restarts=True)),
    "fork_cosine-megatron_seed1": (1, COSINE),
    "fairseq_polynomial_decay_seed0": (1, dict(POLYNOMIAL, min_lr=0.0, schedule_length=10)),
    "fairseq_polynomial_decay_power2_end1e-6": (1, dict(POLYNOMIAL, min_lr=1e-6, power=2.0, schedule_length=20)),
    "fairseq_inverse_sqrt_lr5e-4_warm4000_init1e-7": (
        1,
        dict(lr=5e-4, min_lr=0.0, warmup=4000, warmup_start=1e-7, schedule="fairseq_inverse_sqrt"),
    ),
}


RECIPES = {
    "fairseq": "fairseq_polynomial_decay_seed0",
    "fairseq-nodes": "fork_cosine-megatron_seed1",
    "megatron-deepspeed": "seed2_script_iters_0_500",
}


def peers_rates(name):
    values = json.loads(shared("reference/schedules/lr_values.json").read_text())[name]
    return {int(step): value for step, value in values.items() if step.isdigit()}


@pytest.mark.parametrize("name", PEERS)
def test_every_learning_rate_is_the_peers_own_to_the_last_bit(name):
    unit, settings = PEERS[name]
    optim = OptimConfig(**settings)
    at = peers_rates(name)
    assert {step: learning_rate(step * unit, unit, None, optim) for step in at} == at


@pytest.mark.parametrize("recipe, name", RECIPES.items())
def test_a_recipe_has_the_learning_rates_of_what_it_replaces(recipe, name):
    optim = from_cli([f"recipes/{recipe}"], None).optim
    at = peers_rates(name)
    assert {step: learning_rate(step, 1, None, optim) for step in at} == at


def test_batch_rampup_and_sample_schedule_repeat_a_whole_run_of_megatron():
    rows = shared("reference/schedules/seed4_rampup_lr.csv").read_text().split()[1:]
    plan = Plan.divide(1, 16, 1, Rampup(2, 2, 1000))
    optim = OptimConfig(lr=1e-4, min_lr=1e-6, warmup=5, warmup_start=0.0, schedule_length=12, unit="samples")
    consumed = 0
    for row in rows:
        _, after, batch, micro_batches, lr, _ = row.split(",")
        size = plan.batch_size(consumed)
        assert (size, plan.accumulation(consumed)) == (int(batch), int(micro_batches))
        assert learning_rate(consumed, size, None, optim) == float(lr)
        consumed += size
        assert consumed == int(after)
    assert (plan.steps_within(10_000), plan.samples_after(748)) == (748, 9992) == (len(rows), consumed)


SCALERS = {
    "deepspeed_0.8.0_init2^12_window8_hyst2_min1": ScalerConfig(4096, 8, 2),
    "deepspeed_0.8.0_consecutive_hysteresis": ScalerConfig(4096, 8, 2, consecutive=True),
    "megatron_DynamicGradScaler_init2^12_interval8_hyst2_min1": ScalerConfig(4096, 8, 2),
    "fairseq_init4_window8": ScalerConfig(4, 8, 1, minimum=1e-4),
}


@pytest.mark.parametrize("name", SCALERS)
def test_the_loss_scale_moves_as_the_peers_does(name):
    traces = json.loads(shared("reference/schedules/loss_scale_traces.json").read_text())
    scale, found = LossScale.first(SCALERS[name]), []
    for overflow in traces["overflow"]:
        scale = scale.after(bool(overflow), SCALERS[name])
        found.append(scale.value)
    assert found == traces[name]


def test_the_loss_scale_stays_at_its_minimum():
    stay = ScalerConfig(2.0, 8, 1, minimum=1.0)
    assert LossScale.first(stay).after(True, stay).after(True, stay).value == 1.0


def test_the_first_step_learns_unless_the_warmup_is_told_to_start_at_zero():
    optim = OptimConfig(lr=1.0, min_lr=0.1, warmup=4)
    assert [learning_rate(step, 1, 10, optim) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(0, 1, 10, OptimConfig(lr=1.0, min_lr=0.1, warmup=4, warmup_start=0.0)) == 0.0
    by_samples = OptimConfig(lr=1.0, min_lr=0.1, warmup=10, unit="samples")
    assert [learning_rate(at, 4, 100, by_samples) for at in (0, 4, 8)] == [0.4, 0.8, 1.0]


@pytest.mark.parametrize("length, rates", [(50, [1.0, 0.5, 0.0, 0.0]), (200, [1.0, 0.875, 0.75, 0.5])])
def test_a_schedule_may_be_shorter_or_longer_than_the_budget(length, rates):
    optim = OptimConfig(lr=1.0, min_lr=0.0, schedule="linear", warmup=0, schedule_length=length)
    assert [learning_rate(at, 1, 100, optim) for at in (0, 25, 50, 100)] == rates


@pytest.mark.parametrize(
    "style, middle",
    {
        "linear": 0.55,
        "cosine": 0.55,
        "exponential": 0.1 + 0.9 * (2**0.5 - 1),
        "minus_sqrt": 0.1 + 0.9 * (1 - 0.5**0.5),
        "inverse": 1 / (0.5 / 1.0 + 0.5 / 0.1),
    }.items(),
)
def test_wsd_stays_and_then_falls(style, middle):
    optim = OptimConfig(lr=1.0, min_lr=0.1, schedule="wsd", wsd_decay=20, wsd_style=style)
    assert learning_rate(79, 1, 100, optim) == 1.0
    assert learning_rate(90, 1, 100, optim) == pytest.approx(middle)
    assert learning_rate(100, 1, 100, optim) == pytest.approx(0.1)


def test_wsd_falls_over_the_last_tenth_unless_told_otherwise():
    optim = OptimConfig(lr=1.0, min_lr=0.0, schedule="wsd", wsd_style="linear")
    assert [learning_rate(at, 1, 100, optim) for at in (90, 95, 100, 101)] == [1.0, 0.5, 0.0, 0.0]


def test_periods_of_wsd_each_fall_and_begin_again_at_the_peak():
    optim = OptimConfig(lr=1.0, min_lr=0.1, schedule="wsd", period=50, wsd_decay=10, warmup=20)
    rates = [learning_rate(at, 1, 1000, optim) for at in (10, 20, 40, 45, 50, 60, 90, 95, 100)]
    assert rates == pytest.approx([0.55, 1.0, 1.0, 0.55, 1.0, 1.0, 1.0, 0.55, 1.0])


def test_the_second_half_of_a_cosine_goes_on_where_the_first_stopped():
    whole = OptimConfig(lr=1.0, min_lr=0.1, schedule="cosine")
    rest = OptimConfig(lr=1.0, min_lr=0.1, schedule="half_cosine")
    for at in (0, 10, 35, 50, 60):
        assert learning_rate(at, 1, 50, rest) == pytest.approx(learning_rate(at + 50, 1, 100, whole))


@pytest.mark.parametrize("name", ["linear", "cosine", "half_cosine", "inverse_sqrt", "wsd", "fairseq_polynomial"])
def test_a_run_that_goes_on_after_its_schedule_stays_at_the_lowest_rate(name):
    optim = OptimConfig(lr=1.0, min_lr=0.25, warmup=10, schedule=name)
    assert [learning_rate(at, 1, 100, optim) for at in (101, 1000)] == [0.25, 0.25]


def test_one_period_of_a_cosine_without_a_length_of_its_own_lasts_from_the_warmup_to_the_end():
    optim = OptimConfig(lr=1.0, min_lr=0.0, schedule="fairseq_cosine", warmup=20)
    assert [learning_rate(at, 1, 100, optim) for at in (20, 60, 100, 140)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_inverse_sqrt_does_not_fall_below_the_lowest_rate():
    optim = OptimConfig(lr=1.0, min_lr=0.25, schedule="inverse_sqrt", warmup=4)
    assert [learning_rate(at, 1, 100, optim) for at in (4, 16, 64, 100)] == [1.0, 0.5, 0.25, 0.25]


def test_inverse_sqrt_halves_when_time_quadruples():
    optim = OptimConfig(lr=1.0, min_lr=0.1, schedule="inverse_sqrt", warmup=100)
    assert learning_rate(400, 1, 10_000, optim) == pytest.approx(0.5)
    assert learning_rate(1600, 1, 10_000, optim) == pytest.approx(0.25)
    assert learning_rate(10_001, 1, 10_000, optim) == 0.1


def test_periods_restart_where_they_should():
    optim = OptimConfig(lr=1.0, min_lr=0.0, schedule="fairseq_cosine", period=10, restarts=True)
    assert [learning_rate(at, 1, None, optim) for at in (0, 10, 15, 20)] == pytest.approx([1.0, 0.1, 0.05, 0.01])


def own_schedule(position, length, optim):
    return position / length


def test_a_schedule_of_ones_own_is_a_function():
    optim = OptimConfig(schedule="tests.optim.test_schedules:own_schedule", min_lr=0.0)
    assert learning_rate(5, 1, 10, optim) == 0.5


@pytest.mark.parametrize(
    "schedule", ["linear", "cosine", "half_cosine", "wsd", "fairseq_cosine", "fairseq_polynomial", "megatron1_cosine"]
)
def test_no_schedule_fails_at_the_end_or_past_it(schedule):
    optim = OptimConfig(lr=1.0, min_lr=0.1, schedule=schedule, warmup=10)
    for length in (1, 5, 10, 11, 100):
        for position in (0, 9, 10, 11, 99, 100, 101, 10_000):
            assert math.isfinite(learning_rate(position, 1, length, optim))
