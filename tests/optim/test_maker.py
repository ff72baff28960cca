"""What can make an optimizer, as far as that shows without a weight."""

import pytest
import torch

from hpclm.optim.maker import CHECK


class Closure(torch.optim.SGD):
    def step(self, closure):
        """Updates."""


class Groups:
    def __init__(self, weights, optim, more=1):
        """Makes its own parameter groups."""


@pytest.mark.parametrize(
    "source, said",
    [
        (torch.optim.SGD, None),
        (Groups, None),
        (lambda weights, optim: None, None),
        (lambda weights, optim, more: None, None),
        (lambda a, b: None, None),
        (lambda a, b, c=1: None, None),
        (lambda a: None, "cannot be called with (weights, optim): "),
        (lambda a, b, c: None, "cannot be called with (weights, optim): "),
        (torch.nn.Linear, "cannot be called with (weights, optim): "),
        (dict, "has no signature: "),
        (Closure, "needs a closure "),
        (3, "is neither a class nor a function: "),
    ],
)
def test_an_optimizer_is_a_class_of_pytorchs_kind_or_what_is_called_with_weights_and_settings(source, said):
    problem = CHECK(source)
    assert problem is None if said is None else problem.startswith(said)
