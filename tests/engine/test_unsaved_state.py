"""What an optimizer keeps and a checkpoint would leave out is refused; what every shipped optimizer keeps is saved."""

import pytest
import torch
from torch import nn

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.config.optimizers import OPTIMIZERS, OptimizerKind
from hpclm.engine.state import UnsavableStateError
from hpclm.model.gpt import Block
from hpclm.optim import adamw
from tests.engine.test_native import GPT2, batches_of, engine_of, settings, train
from tests.runs import lines
from tests.states import Kept, state


class Plain(torch.optim.Optimizer):
    """Gradient descent with a moment, and whatever ``keep`` adds."""

    keep = None

    def __init__(self, weights, optim):
        super().__init__(adamw.groups(weights, optim), dict(lr=optim.lr, betas=(0.9, 0.95)))
        self.updates = 0

    @torch.no_grad()
    def step(self):
        self.updates += 1
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                kept["step"] = kept.get("step", 0) + 1
                kept.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.sub_(group["lr"] * kept["exp_avg"])
                self.keep(group, p, kept)


def factored(optimizer, group, p, kept):
    kept["exp_avg_sq_row"] = p.grad.square().flatten(1).mean(1) if p.ndim > 1 else p.grad.square().mean()


def second_moment_without_a_row(optimizer, group, p, kept):
    kept["max_exp_avg_sq"] = p.grad.square()


def narrow(optimizer, group, p, kept):
    kept["exp_avg"] = kept["exp_avg"].bfloat16().float().bfloat16()


def column_by_column(optimizer, group, p, kept):
    kept["exp_avg"] = kept["exp_avg"].t().contiguous().t() if p.ndim > 1 else kept["exp_avg"]


def quantised(optimizer, group, p, kept):
    kept["absmax"] = p.grad.abs().max()


def number(optimizer, group, p, kept):
    kept["mu_product"] = kept.get("mu_product", 1.0) * 0.9


def steps_of_values(optimizer, group, p, kept):
    kept["step"] = torch.ones_like(p)


def counter_of_a_group(optimizer, group, p, kept):
    group["k"] = optimizer.updates


def tensor_of_a_group(optimizer, group, p, kept):
    group["d"] = torch.tensor(float(optimizer.updates))


def option_that_changes(optimizer, group, p, kept):
    group["betas"] = (0.9, 1 - 0.1 / optimizer.updates)


def shared(optimizer, group, p, kept):
    optimizer.state["everywhere"]["norm"] = p.grad.norm()


UNSAVED = {
    factored: "'exp_avg_sq_row' of tokens.weight, a tensor of float32 [64]",
    second_moment_without_a_row: "'max_exp_avg_sq' of tokens.weight, a tensor of float32 [64, 32]",
    narrow: "'exp_avg' of tokens.weight, a tensor of bfloat16 [64, 32]",
    column_by_column: "'exp_avg' of tokens.weight, a tensor of float32 [64, 32], which is not contiguous",
    quantised: "'absmax' of tokens.weight, a tensor of float32 []",
    number: "'mu_product' of tokens.weight, the value 0.9",
    steps_of_values: "'step' of tokens.weight, a tensor of float32 [64, 32]",
    counter_of_a_group: "'k' of a parameter group, the value 1",
    tensor_of_a_group: "'d' of a parameter group, a tensor of float32 []",
    option_that_changes: "'betas' of a parameter group, the value (0.9, 0.9)",
    shared: "state of the value 'everywhere', which is not a weight",
}


def use(monkeypatch, keep):
    """Let optim.name=adamw be an optimizer that keeps what ``keep`` says; checkpoints hold exp_avg."""
    monkeypatch.setattr(Plain, "keep", keep)
    monkeypatch.setitem(OPTIMIZERS, "adamw", OptimizerKind(f"{__name__}:Plain", "", lambda placement: ["exp_avg"]))


@pytest.mark.parametrize("keep, says", UNSAVED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_state_that_a_checkpoint_leaves_out_ends_the_first_step_and_names_it(keep, says, monkeypatch):
    use(monkeypatch, keep)
    with pytest.raises(UnsavableStateError) as refused:
        train(settings(GPT2), 1)
    assert says in str(refused.value)
    assert "optim.name=adamw (tests.engine.test_unsaved_state.Plain)" in str(refused.value)
    assert "Checkpoints save exp_avg of each weight, as declared" in str(refused.value)


def test_state_that_is_declared_and_not_kept_ends_the_first_step(monkeypatch):
    use(monkeypatch, lambda optimizer, group, p, kept: p.ndim > 1 and kept.pop("exp_avg"))
    with pytest.raises(UnsavableStateError, match=r"keeps no .exp_avg. of tokens.weight, which its row in .* declares"):
        train(settings(GPT2), 1)


def test_state_that_comes_after_the_first_step_is_refused_by_the_save(monkeypatch):
    use(monkeypatch, lambda optimizer, group, p, kept: optimizer.updates > 2 and group.update(k=1))
    engine, _ = train(settings(GPT2), 2)
    assert any(name.startswith("optim.exp_avg.") for name in state(engine))
    batches = batches_of(settings(GPT2))
    engine.train_step(batches.step(16), 1e-3, 2)
    with pytest.raises(UnsavableStateError, match="'k' of a parameter group, the value 1"):
        state(engine)


def test_a_run_that_cannot_save_its_optimizer_ends_with_93_and_one_that_saves_nothing_trains(
    tiny, tmp_path, monkeypatch, capsys
):
    use(monkeypatch, lambda optimizer, group, p, kept: optimizer.updates > 2 and group.update(k=1))
    assert cli.main(["train", *tiny("run")]) == 93
    assert "'k' of a parameter group" in capsys.readouterr().err
    assert not [*(tmp_path / "run/checkpoints").glob("step-*")] and len(lines(tmp_path / "run/metrics.jsonl")) < 6
    assert cli.main(["train", *tiny("unsaved", "checkpoint.enabled=false")]) == 0


class Unused(Block):
    """A block with a weight that it does not use."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.extra = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_weight_without_gradients_is_updated_as_one_whose_gradient_is_0(name):
    words = dict(lr=3e-3, min_lr=1e-4, name=name)
    config = settings(dict(GPT2, block=f"{__name__}:Unused"), optim=words)
    engine, _ = train(config, 3)
    kept = state(engine)
    assert not kept["optim.exp_avg.block0.extra"].any()
    other, batches = engine_of(config), batches_of(config)
    other.load(Kept(kept), engine.scalars())
    assert engine.train_step(batches.step(24), 1e-3, 3) == other.train_step(batches.step(24), 1e-3, 3)
    after = state(other)
    assert all(torch.equal(tensor, after[name]) for name, tensor in state(engine).items())
    lost = {name: tensor for name, tensor in kept.items() if name != "optim.exp_avg.block0.extra"}
    with pytest.raises(ConfigError, match="the checkpoint has no optim"):
        engine_of(config).load(Kept(lost), engine.scalars())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "apex_adam", "muon"])
def test_all_that_a_shipped_optimizer_keeps_is_saved(name, dtype):
    words = dict(lr=3e-3, min_lr=1e-4, name=name, groups=[{"match": "norm", "lr": 0.5, "weight_decay": 0.01}])
    engine, _ = train(settings(GPT2, optim=words), 3, dtype)
    kept = {id(value) for entry in engine.optimizer.state.values() for key, value in entry.items() if key != "step"}
    saved = [part for weight in engine.weights for part in engine.state.names(weight)]
    assert len(kept) == len(saved) > len(engine.weights)
    other = engine_of(settings(GPT2, optim=words), dtype)
    assert [*other.state.unsaved(other.weights)] == [*engine.state.unsaved(engine.weights)] == []
