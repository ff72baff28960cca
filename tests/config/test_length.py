"""Where a run ends, against a count of its steps one by one, whatever batches its attempts had."""

import random
from dataclasses import replace

import pytest

from hpclm.config.length import run_length
from hpclm.config.plan import Plan, Position, Rampup
from hpclm.config.schema import BatchConfig, BudgetConfig, RunConfig

CONTEXT, PER_EPOCH = 16, 230


def drawn_budget(draw):
    """A budget in one or two units, with room for a step of any batch below."""
    units = {
        "steps": draw.randint(3, 60),
        "samples": draw.randint(40, 700),
        "tokens": CONTEXT * draw.randint(40, 700) + draw.randint(0, CONTEXT - 1),
        "epochs": draw.choice([0.5, 1.0, 1.7, 3.0]),
    }
    return BudgetConfig(**{name: units[name] for name in draw.sample(sorted(units), draw.choice([1, 1, 1, 2]))})


def drawn_batch(draw):
    size = draw.choice([2, 4, 6, 8, 16, 24, 32])
    start = draw.choice([size, *range(2, size, 2)])
    increments = [increment for increment in range(2, size, 2) if (size - start) % increment == 0]
    ramp = (start, draw.choice(increments), draw.randint(1, 500)) if increments and draw.random() < 0.5 else None
    return BatchConfig(global_size=size, micro_size=2, rampup=ramp)


def size_of(batch, samples):
    """Samples of the step that begins after ``samples`` samples, as Megatron-LM's ramp has it."""
    if batch.rampup is None or samples > batch.rampup[2] or batch.rampup[0] == batch.global_size:
        return batch.global_size
    ramp = Rampup(*batch.rampup)
    every = ramp.samples / ((batch.global_size - ramp.start) // ramp.increment)
    return min(batch.global_size, ramp.start + int(samples / every) * ramp.increment)


def counted(run, step, samples):
    """Every state (step, samples) from here to the end."""
    budget = run.budget
    limits = [
        budget.samples,
        budget.tokens and budget.tokens // CONTEXT,
        budget.epochs and int(budget.epochs * PER_EPOCH),
    ]
    states = [(step, samples)]
    while True:
        after = samples + size_of(run.batch, samples)
        if budget.steps == step or any(limit is not None and after > limit for limit in limits):
            return states
        step, samples = step + 1, after
        states.append((step, samples))


@pytest.mark.parametrize("seed", range(100))
def test_a_run_ends_where_its_samples_reach_the_budget_whatever_batches_its_attempts_had(seed):
    draw = random.Random(seed)
    run = RunConfig(budget=drawn_budget(draw))
    run = replace(run, model=replace(run.model, context=CONTEXT))
    step = samples = 0
    for _ in range(draw.randint(1, 5)):
        run = replace(run, batch=drawn_batch(draw))
        states = counted(run, step, samples)
        ends = {run_length(run, PER_EPOCH, Position(*state)) for state in states}  # from wherever it resumes
        [(steps, end)] = {(length.steps, length.samples) for length in ends}
        assert (steps, end) == states[-1]
        step, samples = draw.choice(states)


def test_a_budget_that_has_been_passed_ends_before_and_keeps_what_was_read():
    run = RunConfig(budget=BudgetConfig(samples=80), batch=BatchConfig(global_size=8, micro_size=2))
    length = run_length(run, None, Position(20, 160))
    assert (length.steps, length.samples) == (10, 160)
    ramped = replace(run, batch=BatchConfig(global_size=64, micro_size=2, rampup=(32, 32, 1000)))
    assert run_length(ramped, None, Position(20, 160)).steps < 20


def test_a_ramp_has_every_batch_size_from_its_start_to_the_last():
    assert Plan.divide(2, 16, 1, Rampup(4, 4, 1000)).accumulations() == [2, 4, 6, 8]
    assert Plan.divide(2, 16, 1).accumulations() == [8]
