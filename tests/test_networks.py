"""Whatever can be done with a network can be done with every network, or is refused by the setting that is not supported.

The cheap verbs are tried with all networks; training, the self-check, conversion and the planner's simulation with a sample, and
with all of them in the whole run, which also draws networks at random.
"""

import json
import os
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.config import ClusterConfig, ModelConfig
from hpclm.config.checks import value_at
from hpclm.config.section import leaves
from hpclm.diagnostics import self_check
from hpclm.distributed.context import single
from hpclm.inference.generation import Batch, window_start
from hpclm.inference.scoring import Document, score, windows
from hpclm.model import count
from hpclm.node.gpus import KINDS
from hpclm.parallel.mesh import Compute, Mesh
from hpclm.planning import forecast
from hpclm.planning.simulate import simulate
from tests import weights
from tests.engine.test_native import CPU, settings, train
from tests.interop import made
from tests.networks import NETWORKS, drawn, sizes

convert = cli.function("convert")

SEED = int(os.environ.get("TEST_SEED", "1"))
EVERY = NETWORKS | {f"drawn {SEED + number}": drawn(SEED + number) for number in range(30)}
SAMPLE = (
    "learned, windows",
    "alibi, sinks, windows",
    "window and nope",
    "gpt2, post",
    "score cap, sinks, windows",
    "multipliers",
    "xielu",
    "rope, longrope",
    "latent",
)
PROMPTS = [[5, 17, 40], [9], [88, 3, 3, 61, 20, 7, 8, 9, 10, 11, 12]]


def networks(often=NETWORKS):
    """All of them; those that are not tried ``often`` are for the whole run."""
    return [pytest.param(name, marks=[] if name in often else [pytest.mark.whole]) for name in EVERY]


def model_of(network):
    """A model with weights that matter to its logits."""
    config = ModelConfig.of(network)
    return weights.build(config, made.Drawn(config).weights).eval()


def logits_of(model, ids):
    with torch.no_grad():
        return model.head(torch.tensor([ids])).logits()[0]


@pytest.mark.parametrize("most", [4, 20], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("name", networks())
def test_a_batch_with_a_cache_computes_what_each_text_gets_alone_without_one(name, most):
    model = model_of(EVERY[name])
    draw = torch.Generator().manual_seed(7)
    with torch.inference_mode():
        batch = Batch(model, PROMPTS, most, 257)
        for _ in range(most):
            for row, ids in zip(batch.logits(), batch.ids, strict=True):
                exact = logits_of(model, ids[window_start(len(ids), 24) :])[-1]
                assert exact.std() > 0.01 and (row - exact).abs().max() < 2e-5 * exact.abs().max().clamp(min=1)
            batch.advance(torch.randint(257, (3,), generator=draw).tolist(), range(3))


@pytest.mark.parametrize("name", networks())
def test_texts_of_any_length_are_scored_as_each_alone(name):
    pytest.importorskip("lm_eval")
    from hpclm.inference.harness import log_likelihoods

    model = model_of(EVERY[name])
    draw = torch.Generator().manual_seed(7)
    texts = [torch.randint(257, (length,), generator=draw).tolist() for length in (3, 9, 10, 25, 60)]

    def alone(window, scored):
        likelihoods = logits_of(model, window[:-1]).double().log_softmax(-1)[range(len(window) - 1), window[1:]]
        return likelihoods[torch.tensor(scored)].sum().item()

    class Bar:
        def update(self, _):
            pass

    scores = score(model, [Document(text, None) for text in texts], None, 4, None, Bar())
    parts = [part for text in texts for part in windows(text, 24)]
    assert scores.nats == pytest.approx(-sum(alone(*part) for part in parts), rel=1e-5)
    pairs = [(text[:1], text[1:]) for text in texts[:4]]
    likelihoods = [value for value, _ in log_likelihoods(model, pairs, 4, lambda: None)]
    assert likelihoods == pytest.approx([alone(text, [True] * (len(text) - 1)) for text in texts[:4]], rel=1e-5)


@pytest.mark.parametrize("name", networks())
def test_the_planner_counts_every_weight(name):
    run = settings(EVERY[name], engine=dict(precision="bf16"))
    plan = forecast.predict(run, KINDS["H100"])
    assert count.parameters(plan.model) == sizes(run.model)
    assert plan.room == "fits" and plan.tokens_per_second and 0 < plan.mfu < 1


@pytest.mark.parametrize("name", networks(SAMPLE[:2]))
def test_a_step_of_every_network_can_be_simulated(name):
    simulation = simulate(settings(EVERY[name], engine=dict(precision="bf16")))
    assert simulation.parameters == simulation.updated == sizes(ModelConfig.of(EVERY[name]))
    assert simulation.waits == 0


@pytest.mark.parametrize("name", networks(SAMPLE))
def test_every_network_learns(name):
    _, results = train(settings(EVERY[name]), 12)
    assert results[-1].loss < results[0].loss


@pytest.mark.parametrize("name", networks(SAMPLE))
def test_every_network_passes_the_self_check(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = replace(settings(EVERY[name]), out=str(tmp_path), cluster=ClusterConfig(self_check=True))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        self_check.check_computation(run, single(), Compute(CPU, torch.float32, Mesh()))
    report = json.loads((tmp_path / "self-check.json").read_text())
    assert (report["way"], report["problems"]) == ("as set", [])


@pytest.mark.parametrize("name", networks(SAMPLE))
def test_every_network_is_converted_both_ways_or_refused_by_a_setting(name, tmp_path):
    network = EVERY[name]
    made.run(tmp_path / "run", network, tokenizer="bytes")
    other = {f"model.{key}=" for key, value in leaves(ModelConfig.of(network)) if value != value_at(ModelConfig(), key)}
    try:
        convert([str(tmp_path / "run"), str(tmp_path / "hf")])
    except ConfigError as error:
        assert any(setting in str(error) for setting in other) and not (tmp_path / "hf").exists()
        return
    convert([str(tmp_path / "hf"), str(tmp_path / "back")])
    tokens = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(3))
    before, after = (made.logits(tmp_path / name, tokens) for name in ("run", "back"))
    assert (after - before).abs().max() < 1e-6 * before.abs().max() and before.std() > 0.01
    try:
        convert([str(tmp_path / "run"), str(tmp_path / "model.gguf")])
    except ConfigError as error:
        assert "cannot be written as GGUF" in str(error) or any(setting in str(error) for setting in other)
