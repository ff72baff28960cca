"""Every engine trains on the device as one process does on a CPU in fp32."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests import parity
from tests.forks import hpclm
from tests.runs import figures

pytestmark = pytest.mark.gpu

ENGINES = {
    "native": [],
    "native-accumulating": ["batch.micro_size=1"],
    "native-recompute": ["engine.recompute=full"],
    "native-chunked-loss": ["engine.loss_chunk=8"],
    "fsdp2": ["engine.name=fsdp2"],
    "fsdp2-zero2": ["engine.name=fsdp2", "engine.zero_stage=2"],
    "fairscale": ["engine.name=fairscale"],
    "deepspeed0": ["engine.name=deepspeed", "engine.zero_stage=0"],
    "deepspeed1": ["engine.name=deepspeed", "engine.zero_stage=1"],
    "deepspeed2": ["engine.name=deepspeed", "engine.zero_stage=2"],
    "deepspeed3": ["engine.name=deepspeed", "engine.zero_stage=3"],
}


def trained(words, out, *more):
    """Loss and gradient norm of each step."""
    name = next((word.partition("=")[2] for word in more if word.startswith("engine.name=")), "native")
    if name in ("deepspeed", "fairscale") and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    ran = words(out, *more)
    hpclm("train", *ran, check=0)
    folder = next(word.partition("=")[2] for word in ran if word.startswith("out="))
    return figures(folder, "loss", "grad_norm")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Losses and norms on a CPU in fp32, for other settings once each."""
    known = {}

    def ask(tiny, *more):
        if more not in known:
            known[more] = trained(tiny, tmp_path_factory.mktemp("cpu"), *more)
        return known[more]

    return ask


@pytest.mark.parametrize("name", ENGINES)
def test_fp32_follows_a_cpu_step_by_step(name, words, tiny, reference):
    found = trained(words, "run", *ENGINES[name])
    assert len(found) == 12
    for (loss, norm), (cpu_loss, cpu_norm) in zip(found, reference(tiny), strict=True):
        assert loss == pytest.approx(cpu_loss, rel=1e-4) and norm == pytest.approx(cpu_norm, rel=1e-3)


@pytest.mark.parametrize("style", parity.STYLES)
def test_every_architecture_follows_a_cpu(style, words, tiny, reference):
    shape = [word for word in parity.STYLES[style] if not word.startswith("batch.")]
    for (loss, norm), (cpu_loss, cpu_norm) in zip(trained(words, "run", *shape), reference(tiny, *shape), strict=True):
        assert loss == pytest.approx(cpu_loss, rel=1e-4) and norm == pytest.approx(cpu_norm, rel=1e-3)


@pytest.mark.parametrize(
    "name, precision",
    [(n, "bf16") for n in ("native", "fsdp2", "fairscale", "deepspeed1", "deepspeed3")] + [("native", "fp16")],
)
def test_half_precision_learns_as_fp32_does(name, precision, words, tiny, reference):
    longer = "budget.steps=60"
    scale = ["scaler.initial=1024"] if precision == "fp16" else []
    found = trained(words, "run", *ENGINES[name], longer, f"engine.precision={precision}", *scale)
    cpu = reference(tiny, longer)
    assert len(found) == 60
    assert max(abs(a - b) for (a, _), (b, _) in zip(found, cpu, strict=True)) < 0.03 * cpu[0][0]
    assert found[-1][0] < found[0][0] - 0.3 * (cpu[0][0] - cpu[-1][0])


CHECKED = {
    "adamw": ["engine.precision=bf16"],
    "muon": ["optim.name=muon", "engine.precision=bf16"],
    "muon-fp32": ["optim.name=muon", "engine.precision=fp32"],
    "muon-fsdp2": ["optim.name=muon", "engine.name=fsdp2", "engine.precision=bf16"],
    "fp16": ["engine.precision=fp16", "scaler.initial=1024"],
    "fp8": ["engine.fp8=rowwise", "engine.precision=bf16", "model.layers=4"],
    "fp8-tensorwise": ["engine.fp8=tensorwise", "engine.precision=bf16", "model.layers=4", "engine.name=fsdp2"],
    "users": ["optim.name=tests.optim.users:Lion", "engine.precision=bf16"],
    "users-fp16": ["optim.name=tests.optim.users:Lion", "engine.precision=fp16", "scaler.initial=1024"],
    "users-numbers": ["optim.name=torch.optim:NAdam", "engine.name=fsdp2", "engine.precision=bf16"],
    "users-matrices": ["optim.name=tests.optim.users:WholeLamb", "engine.precision=fp32"],
    "deepspeed-users": ["engine.name=deepspeed", "engine.zero_stage=2", "optim.name=tests.optim.users:Lion"],
    "deepspeed": ["engine.name=deepspeed", "engine.zero_stage=1", "engine.precision=bf16"],
    "deepspeed3-offload": [
        "engine.name=deepspeed",
        "engine.zero_stage=3",
        "engine.offload=parameters",
        "engine.precision=bf16",
    ],
    "deepspeed2-offload": [
        "engine.name=deepspeed",
        "engine.zero_stage=2",
        "engine.offload=optimizer",
        "engine.precision=fp16",
    ],
    "deepspeed-cpu_adam": [
        "engine.name=deepspeed",
        "engine.zero_stage=1",
        "engine.offload=optimizer",
        "optim.name=cpu_adam",
    ],
}


@pytest.mark.parametrize("name", CHECKED)
def test_the_self_check_agrees_with_the_settings_as_they_are(name, words):
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    ran = words("run", "cluster.self_check=true", "budget.steps=2", *CHECKED[name])
    hpclm("train", *ran, check=0)
    out = next(word.partition("=")[2] for word in ran if word.startswith("out="))
    report = json.loads((Path(out) / "self-check.json").read_text())
    assert (report["way"], report["problems"]) == ("as set", [])
