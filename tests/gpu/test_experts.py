"""Models with experts on the device: products, training and compilation, beside a CPU."""

import json
from pathlib import Path

import pytest
import torch

from hpclm.model.expert_mlp import grouped, one_by_one
from tests.forks import hpclm
from tests.gpu.test_step import stepper
from tests.gpu.test_training import trained
from tests.runs import figures

pytestmark = pytest.mark.gpu
EXPERTS = [
    *("model.experts.count=8", "model.experts.per_token=2", "model.experts.ffn=32", "model.activation=swiglu"),
    *(
        "model.experts.router_score=sigmoid",
        "model.experts.router_choice_bias=true",
        "model.experts.balance_bias=0.001",
    ),
    *("model.experts.balance_sequence=0.01", "model.experts.balance_step=0.01", "model.experts.shared_ffn=16"),
]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_grouped_products_are_those_of_a_loop(dtype, device):
    ends, results = torch.tensor([30, 30, 31, 96, 96, 128], dtype=torch.int32, device=device), []
    generator = torch.Generator().manual_seed(1)
    sizes = (128, 64), (6, 96, 64), (128, 1), (128, 96)
    *inputs, gradient = (torch.randn(size, generator=generator) for size in sizes)
    for multiply in (grouped, one_by_one):
        rows, matrices, factors = leaves = [values.to(device, dtype).requires_grad_() for values in inputs]
        y = multiply(rows, matrices, ends, factors)
        y.backward(gradient.to(device, dtype))
        results.append([y.detach(), *(values.grad for values in leaves)])
    for one, other in zip(*results, strict=True):
        scale = other.abs().max().item()
        assert torch.allclose(one, other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * scale)
    assert not results[0][2][[1, 4]].any()


@pytest.mark.parametrize(
    "more", [[], ["engine.name=fsdp2"], ["engine.recompute=full"], ["model.experts.ffn=30"]], ids=str
)
def test_fp32_follows_a_cpu_step_by_step(more, words, tiny):
    on_cpu = trained(tiny, "cpu", *EXPERTS, *more, "engine.device=cpu")
    for (loss, norm), (cpu_loss, cpu_norm) in zip(trained(words, "run", *EXPERTS, *more), on_cpu, strict=True):
        assert loss == pytest.approx(cpu_loss, rel=1e-4) and norm == pytest.approx(cpu_norm, rel=1e-3)


@pytest.mark.parametrize("more", [["engine.precision=bf16"], ["engine.precision=fp32", "optim.name=muon"]], ids=str)
def test_the_self_check_agrees_with_the_settings_as_they_are(more, words):
    ran = words("run", "cluster.self_check=true", "budget.steps=2", *EXPERTS, *more)
    hpclm("train", *ran, check=0)
    out = next(word.partition("=")[2] for word in ran if word.startswith("out="))
    report = json.loads((Path(out) / "self-check.json").read_text())
    assert (report["way"], report["problems"]) == ("as set", [])


def test_a_run_that_stops_goes_on_as_if_it_had_not(words):
    exact = [*EXPERTS, "engine.deterministic=true", "budget.steps=12", "engine.precision=bf16"]
    whole, parts = words("whole", *exact), words("parts", *exact, "checkpoint.every=6")
    hpclm("train", *whole, check=0)
    hpclm("train", *parts, "stop_at=6", check=0)
    hpclm("train", *parts, check=0)
    wholly, partly = (next(word.partition("=")[2] for word in ran if word.startswith("out=")) for ran in (whole, parts))
    assert figures(partly, "loss", "grad_norm") == figures(wholly, "loss", "grad_norm")


def test_other_routings_compile_nothing_again(device):
    step, _ = stepper(device, "engine.compile=true", "engine.precision=bf16", *EXPERTS)
    step()
    step()
    known = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(10):
        step()
    assert known and torch._dynamo.utils.counters["stats"]["unique_graphs"] == known
