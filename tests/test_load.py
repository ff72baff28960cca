"""The trained network in Python: it computes what the run's own evaluation computes, and its weights go back into a run."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hpclm
from hpclm import config
from hpclm.data import sources
from tests.interop import made
from tests.networks import NETWORKS

OFTEN = ("learned", "rope, some windows", "latent", "multipliers")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.whole]) for name in NETWORKS]
)
def test_a_network_gives_the_loss_of_the_runs_own_evaluation(name, tmp_path):
    made.run(tmp_path / "run", NETWORKS[name], source="synthetic")
    model = hpclm.load(tmp_path / "run")
    settings = model.settings
    source = sources.build_source(settings.data, settings.model, settings.seed)
    samples = source.samples("valid", 4)
    rows = torch.zeros(4, settings.model.context + 1, dtype=torch.int64)
    for number, row in enumerate(rows):
        samples.read(number, row.numpy())
    with torch.no_grad():
        logits = model(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert loss == pytest.approx(hpclm.open(tmp_path / "run").evaluate(samples=4)["loss"], rel=1e-6)
    assert (model.step, model.training) == (7, False)
    assert hpclm.load(tmp_path / "run/checkpoints/step-00000007").step == 7


def test_changed_weights_become_a_run(tmp_path):
    drawn = made.run(tmp_path / "run", NETWORKS["learned"], source="indexed", tokenizer="bytes")
    model = hpclm.load(tmp_path / "run", {"engine.device": "cpu"})
    with torch.no_grad():
        model.stack.layers["tokens"].weight.mul_(2)
    assert model.save(tmp_path / "other") == tmp_path / "other"
    other = hpclm.load(tmp_path / "other", step=0)
    assert torch.equal(other.stack.layers["tokens"].weight, 2 * drawn["tokens.weight"])
    for name, weight in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight), name
    assert other.tokenizer.encode("a") == [97]
    with pytest.raises(hpclm.ConfigError, match="other exists"):
        model.save(tmp_path / "other")


def test_hooks_see_activations_and_gradients_reach_the_weights(tmp_path):
    made.run(tmp_path / "run", NETWORKS["rope"])
    model = hpclm.load(tmp_path / "run")
    seen = []
    model.stack.layers["block1"].register_forward_hook(lambda module, given, output: seen.append(output.shape))
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    assert seen == [(3, 1, NETWORKS["rope"]["hidden"])]
    assert all(weight.grad is not None for weight in model.parameters())


def test_it_generates_what_the_run_generates(tmp_path):
    made.run(tmp_path / "run", NETWORKS["rope"], source="indexed", tokenizer="bytes")
    model = hpclm.load(tmp_path / "run")
    given = dict(tokens=9, temperature=1.0, seed=3)
    assert model.generate(["so", "it"], **given) == hpclm.open(tmp_path / "run").generate(["so", "it"], **given)
    assert model.generate("so", **given) == model.generate(["so"], **given)[0]
    with pytest.raises(hpclm.ConfigError, match="the prompt must be text"):
        model.generate(3)


def test_what_does_not_exist_is_named_with_what_does(tmp_path):
    made.run(tmp_path / "run", NETWORKS["rope"])
    with pytest.raises(hpclm.ConfigError, match=r"run has no checkpoint of step 8; it has 7"):
        hpclm.load(tmp_path / "run", step=8)
    for wrong in ([1, 2], [[1] * 25], [[]]):
        with pytest.raises(hpclm.ConfigError, match=r"must be a tensor \[batch, tokens\] of 1 to 24 tokens, not \["):
            hpclm.load(tmp_path / "run")(torch.tensor(wrong, dtype=torch.int64))
    with pytest.raises(hpclm.ConfigError, match="of 1 to 24 tokens, not list"):
        hpclm.load(tmp_path / "run")([1, 2])
    with pytest.raises(hpclm.ConfigError, match="nowhere"):
        hpclm.load(tmp_path / "nowhere")
    model = hpclm.load(tmp_path / "run")
    with pytest.raises(hpclm.ConfigError, match="neither the run nor its dataset names a tokenizer"):
        model.generate("so")


def test_a_block_of_ones_own_can_be_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_of_load.py").write_text(
        "from hpclm.model.gpt import Block\n\n\nclass Mine(Block):\n    def forward(self, x, context):\n"
        "        return 2 * super().forward(x, context)\n"
    )
    made.run(tmp_path / "run", NETWORKS["rope"])
    settings = config.load(tmp_path / "run/config.yaml", ["model.block=own_of_load:Mine"])
    config.dump(settings, tmp_path / "run/config.yaml")
    model = hpclm.load("run")
    assert type(model.stack.layers["block0"]) is sys.modules["own_of_load"].Mine
    assert model(torch.tensor([[1, 2]])).isfinite().all()
