"""What the trial of an optimizer of the user's own takes for the same, and for what sizes it takes what it finds."""

import pytest
import torch

from hpclm.config.optimizers import StateTensor
from hpclm.optim import trial
from hpclm.optim.trial import BIASES, MATRIX, STACK, TABLE, VECTOR, OptimizerTrial

OF_BLOCK = "block3.attention.qkv.weight"


@pytest.mark.parametrize(
    "name, shape, like",
    [
        (OF_BLOCK, (9, 3), MATRIX),
        ("output.weight", (9, 3), TABLE),
        ("norm.weight", (9,), VECTOR),
        ("block3.norm2.bias", (9,), VECTOR),
        ("block3.mlp.experts.down", (2, 9, 3), STACK),
        ("block3.mlp.experts.down_bias", (2, 9), BIASES),
    ],
)
def test_each_weight_is_like_one_that_was_tried(name, shape, like):
    assert trial.example(name, shape) == like


def test_what_is_kept_of_a_weight_of_another_size_has_the_lengths_that_its_own_has_there():
    rows, columns = trial.SHAPES[MATRIX]
    kept = {
        "average": torch.zeros(rows, columns),
        "factor": torch.zeros(rows, 1),
        "other": torch.zeros(columns),
        "scale": torch.zeros(()),
        "unclear": torch.zeros(7),
        "half": torch.zeros(rows, columns, dtype=torch.bfloat16),
        "step": torch.zeros(()),
        "count": 3,
    }
    found = OptimizerTrial({MATRIX: kept}, {}, (), None, None)
    assert found.state(OF_BLOCK, (9, 3)) == {
        "average": StateTensor((9, 3)),
        "factor": StateTensor((9, 1), "everywhere"),
        "other": StateTensor((3,), "everywhere"),
        "scale": StateTensor((), "everywhere"),
    }
    assert found.scalars(OF_BLOCK, (9, 3)).keys() == {"scale", "step", "count"}


@pytest.mark.parametrize(
    "value, other, same",
    [
        (1000.0, 1000.9, True),
        (1000.0, 1001.1, False),
        (-1.0, 1.0, False),
        (0, 0, True),
        (1.0, None, False),
        ("x", "x", False),
    ],
)
def test_numbers_are_the_same_within_a_thousandth(value, other, same):
    assert trial._close(value, other) == same


def test_numbers_of_a_group_leave_out_the_learning_rate_and_what_is_on_or_off():
    group = {
        "params": [],
        "lr": 0.1,
        "eps": 1e-8,
        "fused": True,
        "betas": (0.9, 0.99),
        "total": torch.tensor(2.0),
        "name": "x",
    }
    assert trial._numbers(group) == {"eps": 1e-8, "total": 2.0}
