"""How batches are divided, and how long a run is, by hand."""

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config.length import inside_warmup, run_length
from hpclm.config.plan import Length, Plan, Rampup


@pytest.mark.parametrize(
    "processes, size, micro, rampup, problems",
    [
        (1, 16, 3, None, ["batch.global_size=16 MULTIPLE3 x 1 data-parallel replica = 3; batch.micro_size=1 fits"]),
        (4, 24, 4, None, ["batch.global_size=24 MULTIPLE4 x 4 data-parallel replicas = 16; batch.micro_size=2 fits"]),
        (5, 16, 2, None, ["batch.global_size=16 MULTIPLE2 x 5 data-parallel replicas = 10; batch.global_size=20 fits"]),
        (1, 16, 4, Rampup(8, 2, 9), ["batch.rampup's increment=2 MULTIPLE4 x 1 data-parallel replica = 4"]),
        (2, 16, 4, Rampup(4, 4, 9), [
            "batch.rampup's start=4 MULTIPLE4 x 2 data-parallel replicas = 8",
            "batch.rampup's increment=4 MULTIPLE4 x 2 data-parallel replicas = 8",
        ]),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_divided_are_answered_with_those_that_can(processes, size, micro, rampup, problems):
    with pytest.raises(ConfigError) as caught:
        Plan.divide(processes, size, micro, rampup)
    assert caught.value.problems == [
        text.replace("MULTIPLE", "must be a multiple of batch.micro_size=") for text in problems
    ]


def test_a_ramp_grows_by_its_increment_until_its_samples_are_read():
    """Two increments over 100 samples: after 50, and at 100, which is as Megatron-LM has it."""
    plan = Plan.divide(2, 24, 2, Rampup(8, 8, 100))
    assert [plan.batch_size(samples) for samples in (0, 49, 50, 99, 100, 101, 999)] == [8, 8, 16, 16, 24, 24, 24]
    assert [plan.accumulation(samples) for samples in (0, 50, 100)] == plan.accumulations() == [2, 4, 6]
    assert Plan.divide(2, 24, 2).accumulations() == [6]
    level = Plan.divide(1, 8, 2, Rampup(8, 8, 100))
    assert [level.batch_size(samples) for samples in (0, 100, 101)] == [8, 8, 8] and level.accumulations() == [4]


def test_samples_and_steps_of_a_ramp_are_counted_from_where_a_run_is():
    plan = Plan.divide(1, 24, 2, Rampup(8, 8, 100))
    sums = [0, 8, 16, 24, 32, 40, 48, 56, 72, 88, 104, 128, 152]
    assert [plan.samples_after(steps) for steps in range(13)] == sums
    assert [plan.samples_after(steps, 56) for steps in (0, 1, 4)] == [56, 72, 128]
    assert plan.samples_after(-3, 152) == 152
    assert [plan.steps_within(samples) for samples in (0, 7, 8, 55, 56, 71, 72, 127, 128)] == [
        0,
        0,
        1,
        6,
        7,
        7,
        8,
        10,
        11,
    ]
    assert [plan.steps_within(samples, 56) for samples in (56, 72, 128)] == [0, 1, 4]
    assert plan.steps_within(104, 152) == -2


def run(*words):
    return config.load(
        None, ["data.source=synthetic", "batch={global_size: 8, micro_size: 2}", "model.context=16", *words]
    )


@pytest.mark.parametrize(
    "words, end",
    [
        (["budget.samples=8"], (1, 8)),
        (["budget.tokens=255"], (1, 8)),  # of 16 in each sample, the last of which is cut
        (["budget.tokens=256"], (2, 16)),
        (["budget.epochs=1.5"], (3, 24)),  # of 19 samples: 28.5
        (["budget={steps: 2, epochs: 1.5}"], (2, 16)),
        (["budget={steps: 5, epochs: 1.5}"], (3, 24)),
        (["budget.hours=1", "optim.schedule=constant"], (None, None)),
    ],
)
def test_the_first_limit_that_is_reached_ends_a_run(words, end):
    length = run_length(run(*words), 19)
    assert (length.steps, length.samples) == end


def test_epochs_count_only_where_their_samples_are_known():
    assert run_length(run("budget={steps: 9, epochs: 1}"), None) == Length(9, 72)


@pytest.mark.parametrize(
    "words, count", [(["budget.samples=7"], "budget.samples=7 is 7"), (["budget.tokens=127"], "budget.tokens=127 is 7")]
)
def test_a_budget_without_room_for_the_first_step_is_refused(words, count):
    with pytest.raises(ConfigError, match=f"{count} samples of 16 tokens, less than the first step's 8; raise it"):
        run_length(run(*words), None)


@pytest.mark.parametrize(
    "words, length, told",
    [
        (["optim.warmup=10"], Length(11, 88), None),
        (["optim.warmup=10"], Length(10, 80), "after 10 steps, inside its warm-up of 10 (optim.warmup)"),
        (["optim={warmup: 81, unit: samples}"], Length(10, 80), "after 80 samples, inside its warm-up of 81"),
        (["optim={warmup: 79, unit: samples}"], Length(10, 80), None),
        (
            ["optim={warmup_fraction: 0.5, schedule_length: 40}"],
            Length(20, 160),
            "after 20 steps, inside its warm-up of 20",
        ),
        (["optim={warmup_fraction: 0.5}"], Length(20, 160), None),
        (["optim.warmup=10"], Length(None, None), None),
    ],
)
def test_a_run_that_ends_inside_its_warm_up_is_told(words, length, told):
    said = inside_warmup(run(*words), length)
    assert said is None if told is None else told in said
