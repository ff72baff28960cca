"""Optimizers of models with experts: each expert is a matrix, and its biases are biases."""

import pytest
import torch

from hpclm.config.optimizers import hidden_matrix
from hpclm.optim.optimizers import rate_and_decay
from tests.engine.test_experts import EXPERTS as EXPERT_WORDS
from tests.engine.test_native import LLAMA, batches_of, engine_of, settings
from tests.parity import trained
from tests.states import state

EXPERTS = {
    **LLAMA,
    "layers": 2,
    "experts.count": 8,
    "experts.per_token": 2,
    "experts.ffn": 24,
    "mlp_bias": True,
    "experts.router_bias": True,
}


@pytest.mark.parametrize("policy", ["matrices", "non_embedding", "all"])
def test_biases_of_experts_decay_as_other_biases_do(policy):
    config = settings(EXPERTS, optim=dict(decayed=policy, weight_decay=0.3))
    decays = {w.name: rate_and_decay(w.name, w.placement, config.optim)[1] for w in engine_of(config).weights}
    of_experts = {name.removeprefix("block1.mlp."): decay for name, decay in decays.items() if "block1.mlp." in name}
    biases = 0.3 if policy == "all" else 0.0
    assert of_experts == {
        "router.weight": 0.3,
        "router.bias": biases,
        "experts.up": 0.3,
        "experts.down": 0.3,
        "experts.up_bias": biases,
        "experts.down_bias": biases,
    }


def test_the_router_and_each_expert_are_matrices_for_muon_and_biases_of_experts_are_none():
    names = {w.name for w in engine_of(settings(EXPERTS)).weights if hidden_matrix(w.placement)}
    assert {name.removeprefix("block0.mlp.") for name in names if "block0.mlp." in name} == {
        "router.weight",
        "experts.up",
        "experts.down",
    }


@pytest.mark.parametrize("own", [dict(), dict(split=False, adjust="original")], ids=["split", "whole"])
def test_the_updates_of_experts_are_those_of_pytorchs_muon_on_each_ones_matrices(own):
    optim = dict(name="muon", lr=3e-3, min_lr=1e-4, clip=0.0, **own)
    config = settings(EXPERTS, optim=optim)
    engine, batches = engine_of(config), batches_of(config)
    stacks = [w for w in engine.weights if w.name.endswith(("experts.up", "experts.down"))]
    width = config.model.expert_width
    assert len(stacks) == 4

    def matrices(weight, values):
        rows = width if config.optim.split and weight.name.endswith("up") else values.shape[1]
        return [part for of_expert in values for part in of_expert.split(rows)]

    copies = {w.name: [torch.nn.Parameter(v.clone()) for v in matrices(w, w.parameter.detach())] for w in stacks}
    reference = torch.optim.Muon(
        [copy for name in copies for copy in copies[name]],
        weight_decay=config.optim.weight_decay,
        momentum=config.optim.momentum,
        ns_steps=config.optim.newton_schulz_steps,
        adjust_lr_fn=config.optim.adjust,
    )
    step = engine.optimizer.step

    def both():
        for weight in stacks:
            for copy, gradient in zip(copies[weight.name], matrices(weight, weight.parameter.grad), strict=True):
                copy.grad = gradient.clone()
        reference.param_groups[0]["lr"] = engine.optimizer.param_groups[0]["lr"]
        reference.step()
        step()

    engine.optimizer.step = both
    for number in range(10):
        engine.train_step(batches.step(8 * number), 3e-3 / (1 + number), number)
    for weight in stacks:
        for values, copy in zip(matrices(weight, weight.parameter.detach()), copies[weight.name], strict=True):
            assert torch.equal(values, copy), weight.name
    kept = state(engine)
    assert kept["optim.momentum_buffer.block0.mlp.experts.up"].shape == (8, 48, 32)
    assert kept["optim.exp_avg.block0.mlp.experts.up_bias"].shape == (8, 48)
    assert engine.scalars()["optimizer_steps"] == 10


@pytest.mark.parametrize(
    "more",
    [
        dict(qk_clip=0.01),
        dict(guard="skip_step"),
        dict(guard="clip_update"),
        dict(name="muon", newton_schulz_type="fp32", qk_clip=0.01),
    ],
    ids=str,
)
def test_qk_clip_and_guards_work_beside_experts(more):
    """The same steps on two ranks that share out the experts."""
    words = [f"optim.{name}={value}" for name, value in more.items()]
    alone, together = (
        trained(size, *EXPERT_WORDS, *words, *of, steps=3) for size, of in ((1, []), (2, ["parallel.expert=2"]))
    )
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    for mine, right in zip(together["reports"], alone["reports"], strict=True):
        assert mine == pytest.approx(right, rel=1e-5, abs=1e-6)
    assert ("max_attention_score" in alone["reports"][0]) == ("qk_clip" in more)
    for name, right in alone["tensors"].items():
        assert torch.allclose(together["tensors"][name], right, rtol=1e-3, atol=1e-5), name
