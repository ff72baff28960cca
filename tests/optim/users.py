"""Optimizers as users write them, outside the package, and what ranks do with them."""

from dataclasses import replace
from pathlib import Path

import torch

from hpclm.checkpoint import CheckpointStore, Retention
from hpclm.optim.adamw import groups
from tests.engine.sharded import made, steps


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023."""

    splits = True

    def __init__(self, params, lr=1e-4, weight_decay=0.0, betas=(0.9, 0.99)):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * state["exp_avg"].lerp(p.grad, 1 - fast).sign())
                state["exp_avg"].lerp_(p.grad, 1 - slow)


class Lamb(torch.optim.Optimizer):
    """You et al. 2020: a norm of the whole weight is in its update."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-6):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - first)
                state["v"].lerp_(p.grad.square(), 1 - second)
                update = state["m"] / (state["v"].sqrt() + group["eps"]) + group["weight_decay"] * p
                norm, length = p.norm(), update.norm()
                p.sub_(group["lr"] * torch.where((norm > 0) & (length > 0), norm / length, 1.0) * update)


class WholeLamb(Lamb):
    """That says so."""

    matrices = True


class Factored(torch.optim.Optimizer):
    """Of a matrix it keeps the mean squares of rows and of columns, and a number; of other weights, the squares."""

    def matrices(placement):
        return placement.dimensions == 2

    def __init__(self, params, lr=1e-3):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state and p.ndim < 2:
                    state["square"] = torch.zeros_like(p)
                elif not state:
                    state.update(
                        rows=torch.zeros(len(p), 1), columns=torch.zeros_like(p[0]), norm=torch.ones(()), updates=0
                    )
                if p.ndim < 2:
                    state["square"].lerp_(p.grad.square(), 0.1)
                    p.sub_(group["lr"] * p.grad / (state["square"].sqrt() + 1e-3))
                    continue
                state["updates"] += 1
                state["rows"].lerp_(p.grad.square().mean(1, keepdim=True), 0.1)
                state["columns"].lerp_(p.grad.square().mean(0), 0.1)
                state["norm"].lerp_(p.norm(), 0.1)
                scale = (state["rows"] * state["columns"] / state["rows"].mean()).sqrt() + 1e-3
                p.sub_(group["lr"] * state["norm"] * (1 - 0.9 ** state["updates"]) * p.grad / scale)


class Counting(torch.optim.Optimizer):
    """A number that each parameter group counts, one of each weight, and integer steps, as many write them."""

    splits = True

    def __init__(self, params, lr=1e-3):
        super().__init__(params, dict(lr=lr, total=0.0))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["total"] += group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, average=torch.zeros_like(p), decayed=torch.ones(()))
                state["step"] += 1
                state["decayed"] *= 0.97
                state["average"].lerp_(p.grad, 0.1)
                p.sub_(state["average"] / (1 - 0.9 ** state["step"]), alpha=group["lr"] * (1 + group["total"]))
                p.mul_(1 - group["lr"] * state["decayed"])


def muon(weights, optim, *, ns_steps=5):
    """PyTorch's Muon of the matrices, and its AdamW of the rest."""
    return Both(groups(weights, optim), ns_steps)


class Both(torch.optim.Optimizer):
    """Two optimizers."""

    def __init__(self, of_weights, ns_steps):
        self.parts = []
        for kind, more, dims in ((torch.optim.Muon, {"ns_steps": ns_steps}, (2,)), (torch.optim.AdamW, {}, (0, 1, 3))):
            chosen = [dict(group, params=[p for p in group["params"] if p.ndim in dims]) for group in of_weights]
            chosen = [group for group in chosen if group["params"]]
            self.parts += [kind(chosen, **more)] if chosen else []
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            part.state = self.state

    def step(self):
        for part in self.parts:
            part.step()


def goes_on(folder, stop, words):
    """Resume from a folder's newest checkpoint, train until ``stop``, save, and go on for two steps: once as it is, and once as another
    process would, from the checkpoint. The losses on the way to ``stop``."""
    run, engine, batches, context = made(words)
    store = CheckpointStore(Path(folder), Retention(99), {}, context)
    progress = store.resume(engine, "auto")
    losses = [result.loss for result in steps(run, engine, batches, progress.step, stop)]
    store.save(engine, replace(progress, step=stop, samples=stop * run.batch.global_size))
    _, other, again, _ = made(words)
    assert store.resume(other, "require").step == stop
    wanted, got = (steps(run, one, many, stop, stop + 2) for one, many in ((engine, batches), (other, again)))
    assert [result.numbers for result in got] == [result.numbers for result in wanted]
    assert other.scalars() == engine.scalars()
    for weight, same in zip(engine.weights, other.weights, strict=True):
        mine, theirs = (one.optimizer.state[w.parameter] for one, w in ((engine, weight), (other, same)))
        assert mine.keys() == theirs.keys() and torch.equal(weight.parameter, same.parameter)
        assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key])) for key, value in mine.items())
    return losses


class Attributes(Lion):
    """Its momentum is no state, so no checkpoint has it."""

    def __init__(self, params, lr=1e-4):
        super().__init__(params, lr)
        self.momentum = {}

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.momentum[p] = 0.9 * self.momentum.get(p, 0.0) + p.grad
            p.sub_(0.01 * self.momentum[p])


class LateCounter(torch.optim.SGD):
    """A number of its parameter groups is made in the first update."""

    def step(self):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            group["lr"] = 0.1 / group["calls"]
        super().step()


class Skipping(torch.optim.SGD):
    """It counts its steps by weight, skips weights whose gradient is 0, and moves less with every step."""

    def step(self):
        """Of what has a gradient."""
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["step"] = self.state[p].get("step", 0) + int(bool(p.grad.any()))
            p.grad /= 1 + self.state[p]["step"]
        super().step()


class ScheduleFree(torch.optim.SGD):
    """Its gradients are not taken where it is evaluated."""

    def eval(self):
        """Put the average into the weights."""

    def train(self):
        """Put back what is trained."""


class Noisy(torch.optim.SGD):
    """It draws random numbers."""

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad += 0.01 * torch.randn_like(p)
        super().step()
