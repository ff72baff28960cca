"""An optimizer that keeps state of every kind that one can declare, and what the ranks of tests/optim/test_declared_state.py do with it."""

import torch

from hpclm.config.optimizers import OPTIMIZERS, OptimizerKind, StateTensor
from hpclm.optim.adamw import groups
from tests.optim import users


def is_matrix(placement):
    return placement.dimensions == 2


def state(placement, optim):
    """Of the weight's shape; and of a whole matrix, of one side of it, and a scalar, on one process."""
    shape = placement.shape
    kept = {"exp_avg": StateTensor(shape)}
    if is_matrix(placement):
        kept |= {
            "left": StateTensor((shape[0], shape[0]), "matrix"),
            "columns": StateTensor((shape[1],), "matrix"),
            "norm": StateTensor((), "matrix"),
        }
    return kept


class Declared(torch.optim.Optimizer):
    """Every kind of state changes in each update, and changes the next one."""

    def __init__(self, weights, optim):
        super().__init__(groups(weights, optim), dict(lr=optim.lr))
        self.matrices = [weight for weight in weights if is_matrix(weight.placement)]

    def share(self, exchange):
        self.exchange = exchange

    @torch.no_grad()
    def step(self):
        directions = {}
        for numbers in self.exchange.rounds:
            gradients = [self.matrices[number].parameter.grad for number in numbers]
            for number, values in zip(numbers, self.exchange(numbers, gradients, self.direction), strict=True):
                directions[self.matrices[number].parameter] = values
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                kept.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                kept["step"] = kept.get("step", 0) + 1
                moved = kept["exp_avg"]
                p.sub_(group["lr"] * (moved.view_as(p) + directions.get(p, moved).view_as(p)))

    def direction(self, number, gradient):
        kept = self.state[self.matrices[number].parameter]
        rows, columns = gradient.shape
        left = kept.setdefault("left", torch.zeros(rows, rows)).lerp_(gradient @ gradient.T, 0.1)
        scale = kept.setdefault("columns", torch.zeros(columns)).lerp_(gradient.square().mean(0), 0.1)
        norm = kept.setdefault("norm", torch.zeros(())).lerp_(gradient.norm(), 0.1)
        return (left / left.norm() @ gradient + gradient) / (scale.sqrt() + norm)


KIND = OptimizerKind(
    f"{__name__}:Declared",
    "",
    state,
    matrices=is_matrix,
    settings=("eps",),
    family="declared",
)


def goes_on(folder, stop, words):
    """As tests.optim.users', with this optimizer as optim.name=muon."""
    OPTIMIZERS["muon"] = KIND
    return users.goes_on(folder, stop, words)
