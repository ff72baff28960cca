"""The formulas against published runs. The limits are of medians over all rows, or over the half that is kept back."""

from dataclasses import replace
from statistics import median

import pytest

from hpclm import config
from hpclm.node.gpus import KINDS
from hpclm.planning import forecast, time
from tests.forks import hpclm
from tests.planning.published import rows, scaling

FAMILIES = sorted({row.family for row in scaling()})


def fitted(some):
    """The efficiency of products at which as many rows are predicted too fast as too slow."""
    low, high = 0.1, 1.5
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if median(row.ratio(middle) for row in some) < 1 else (low, middle)
    return low


def errors(some, efficiency=None):
    return [abs(row.ratio(efficiency) - 1) for row in some]


def test_most_of_what_ran_is_said_to_fit_and_the_rest_misses_by_little():
    over = [row.gib / row.kind.memory - 1 for row in rows() if row.gib > row.kind.memory]
    assert len(rows()) == 162 and len(over) < 0.12 * len(rows())
    assert max(over) < 0.15


@pytest.mark.parametrize("family", time.EFFICIENCY)
def test_the_constants_are_those_that_the_runs_give_and_half_the_runs_serve_for_the_other_half(family):
    mine = [row for row in rows() if row.kind.family == family]
    assert fitted(mine) == pytest.approx(time.EFFICIENCY[family], rel=0.02)
    assert median(errors(mine)) < 0.08
    assert median(errors(mine[1::2], fitted(mine[::2]))) < 0.08


def kept_back(family):
    """Errors of the rows kept back, with the constant of the others."""
    efficiency = fitted([row for row in scaling()[::2] if row.family == family])
    return errors([row for row in scaling()[1::2] if row.family == family], efficiency)


def test_runs_from_one_gpu_to_512_that_were_kept_back_are_predicted_within_a_tenth():
    by_family = [kept_back(family) for family in FAMILIES]
    assert all(len(some) >= 12 and median(some) < 0.10 for some in by_family)
    every = [error for some in by_family for error in some]
    assert len(every) == 37 and median(every) < 0.09
    assert sum(error < 0.2 for error in every) > 0.8 * len(every)


def test_more_nodes_never_help_a_gpu():
    run = config.load("configs/gpt-1b3.yaml", ["job.gpus=8", "batch.micro_size=4", "engine.precision=bf16"])
    plans = [
        forecast.predict(replace(run, job=replace(run.job, nodes=nodes)), KINDS["H200"]) for nodes in (1, 2, 4, 8, 16)
    ]
    rates = [plan.tokens_per_second / plan.layout.gpus for plan in plans]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0.9 * rates[0]


def test_a_table_of_files_takes_for_each_as_many_gpus_as_it_needs():
    lines = hpclm("planner", "configs/gpt2-124m.yaml", "configs/llama-7b.yaml", check=0).stdout.splitlines()
    assert [line.split()[2] for line in lines[1:]] == ["1", "8"]
    assert not any("does not fit" in line for line in lines)
