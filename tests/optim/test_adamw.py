import sys

import pytest
import torch
from torch import nn

from hpclm.config import OptimConfig
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.optim.adamw import set_state, steps_taken, update
from hpclm.optim.optimizers import optimizer_of
from hpclm.parallel.placement import Placement
from tests.engine.test_native import GPT2, settings, train

NAMES = ("adamw", "apex_adam")


def parameters():
    draw = torch.Generator().manual_seed(0)
    found = [nn.Parameter(torch.randn(4, 3, generator=draw)), nn.Parameter(torch.randn(3, generator=draw))]
    for p in found:
        p.grad = torch.randn(p.shape, generator=draw)
    return found


def made(found, optim):
    optimizer = optimizer_of([ShardedParameter("w", p, Placement(tuple(p.shape))) for p in found], optim)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    return optimizer


def norm_of(found):
    return torch.nn.utils.get_total_norm([p.grad for p in found])


@pytest.fixture
def apex(tmp_path, monkeypatch):
    """A package that has FusedAdam's face (state, step count of a group, no found_inf) and PyTorch's arithmetic."""
    (tmp_path / "apex/optimizers").mkdir(parents=True)
    (tmp_path / "apex/__init__.py").write_text("")
    (tmp_path / "apex/optimizers/__init__.py").write_text("""
import torch
class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, eps, adam_w_mode):
        assert adam_w_mode
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (a, b), n = group["betas"], group["step"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(a).add_(p.grad, alpha=1 - a)
                v.mul_(b).addcmul_(p.grad, p.grad, value=1 - b)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (m / (1 - a**n)) / ((v / (1 - b**n)).sqrt() + group["eps"]))
""")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


def stepped(name, bad, limit=0.1, scale=8.0):
    optim, found = OptimConfig(name=name), parameters()
    optimizer = made(found, optim)
    for p in found:
        p.grad.mul_(scale)
    for _ in range(3):
        gradients = [p.grad.clone() for p in found]
        update(optimizer, norm_of(found), limit, scale, torch.tensor(float(bad)))
        for p, gradient in zip(found, gradients, strict=True):
            p.grad = gradient
    return optimizer, found


def test_apex_takes_the_same_steps_as_pytorch(apex):
    ours, wanted = stepped("adamw", bad=False)
    theirs, found = stepped("apex_adam", bad=False)
    assert type(theirs).__module__ == "apex.optimizers"
    assert steps_taken(ours) == steps_taken(theirs) == 3
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_an_engine_trains_with_apexs_adam_as_with_pytorchs(apex):
    found = {name: train(settings(GPT2, optim=dict(name=name, lr=3e-3, min_lr=1e-4)))[1] for name in NAMES}
    for ours, theirs in zip(*found.values(), strict=True):
        assert (ours.loss, ours.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=1e-4)


def test_a_bad_step_moves_nothing_with_either(apex):
    for name in ("adamw", "apex_adam"):
        optimizer, found = stepped(name, bad=True)
        assert steps_taken(optimizer) == 0
        for p, before in zip(found, parameters(), strict=True):
            assert torch.equal(p, before)


@pytest.mark.parametrize("name", ["adamw", "apex_adam"])
def test_moments_that_are_restored_are_those_that_were(apex, name):
    optimizer, found = stepped(name, bad=False)
    optim = OptimConfig(name=name)
    copies = [nn.Parameter(p.detach().clone()) for p in found]
    other = made(copies, optim)
    for p, copy in zip(found, copies, strict=True):
        moments = {m: optimizer.state[p][m].clone() for m in ("exp_avg", "exp_avg_sq")}
        set_state(other, copy, moments, steps_taken(optimizer))
        copy.grad = p.grad.clone()
    for each, its in ((optimizer, found), (other, copies)):
        update(each, norm_of(its), 0.1, 8.0, torch.tensor(0.0))
    for p, copy in zip(found, copies, strict=True):
        assert torch.equal(p, copy)


def test_an_optimizer_that_is_not_fused_gets_gradients_unscaled_and_clipped():
    for limit, moved in ((0.0, [3.0, 4.0]), (10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])):
        p = nn.Parameter(torch.zeros(2))
        p.grad = 8.0 * torch.tensor([3.0, 4.0])
        update(torch.optim.SGD([p], lr=1.0), norm_of([p]), limit, 8.0, torch.tensor(0.0))
        assert p.tolist() == pytest.approx([-value for value in moved], rel=1e-5)


def test_without_apex_pytorchs_own_is_used_and_the_log_says_so(caplog):
    found = parameters()
    optim = OptimConfig(name="apex_adam")
    assert isinstance(made(found, optim), torch.optim.AdamW)
    assert "NVIDIA apex is not usable here" in caplog.text
