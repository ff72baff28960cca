"""Checkpoints of a GPU: taken while training continues, exact, and good on another device."""

import shutil
from pathlib import Path

import pytest

from tests.forks import hpclm
from tests.runs import figures, losses

pytestmark = pytest.mark.gpu
EXACT = "engine.deterministic=true"


def folder(words):
    return next(word.partition("=")[2] for word in words if word.startswith("out="))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saving_beside_the_training_changes_no_bit_of_it(precision, words):
    plain = words("plain", EXACT, "budget.steps=40", f"engine.precision={precision}")
    saving = words("saving", EXACT, "budget.steps=40", f"engine.precision={precision}", "checkpoint.every=1")
    hpclm("train", *plain, check=0)
    hpclm("train", *saving, check=0)
    assert losses(folder(saving)) == losses(folder(plain))


AVERAGED = ["optim.ema=0.9", "evaluate={every: 10, batches: 1}", "engine.precision=bf16"]
USERS = [
    ["optim.name=tests.optim.users:Lion", "engine.precision=bf16"],
    ["optim.name=torch.optim:NAdam"],
    ["optim.name=tests.optim.users:WholeLamb", "engine.name=fsdp2"],
]
"""Optimizers of the user's own: a plain one, one that keeps numbers beside tensors, one that works on whole matrices."""


@pytest.mark.parametrize(
    "engine", [[], ["engine.name=fsdp2"], ["engine.precision=bf16", "model.dropout=0.1"], AVERAGED, *USERS], ids=str
)
def test_a_resumed_run_equals_one_that_never_stopped_bit_for_bit(engine, words):
    """The snapshot of step 20 is taken while step 21 runs: were it of a later state, the losses would differ."""
    whole = words("whole", EXACT, "budget.steps=40", *engine)
    parts = words("parts", EXACT, "budget.steps=40", "checkpoint.every=20", *engine)
    hpclm("train", *whole, check=0)
    hpclm("train", *parts, check=0)
    shutil.rmtree(Path(folder(parts)) / "checkpoints/step-00000040")
    said = hpclm("train", *parts, check=0)
    assert "20" in said.stderr and losses(folder(parts)) == losses(folder(whole))
    averaged = figures(folder(parts), "step", "validation_loss_ema")
    assert averaged == figures(folder(whole), "step", "validation_loss_ema") and bool(averaged) == (engine is AVERAGED)


def test_a_cpu_goes_on_from_a_gpus_checkpoint(words, tiny, device):
    whole = words("whole", "budget.steps=24")
    hpclm("train", *whole, check=0)
    first = words("moved", "budget.steps=24", "checkpoint.every=12")
    hpclm("train", *first, "stop_at=12", check=0)
    hpclm("train", *tiny("moved", "budget.steps=24", "engine.device=cpu", "checkpoint.every=12"), check=0)
    for (loss,), (other,) in zip(figures(folder(first), "loss"), figures(folder(whole), "loss"), strict=True):
        assert loss == pytest.approx(other, rel=1e-4)


def test_a_gpu_goes_on_from_a_cpus_checkpoint(words, tiny):
    whole = tiny("whole", "budget.steps=24")
    hpclm("train", *whole, check=0)
    hpclm("train", *tiny("moved", "budget.steps=24", "stop_at=12"), check=0)
    last = words("moved", "budget.steps=24")
    hpclm("train", *last, check=0)
    for (loss,), (other,) in zip(figures(folder(last), "loss"), figures(folder(whole), "loss"), strict=True):
        assert loss == pytest.approx(other, rel=1e-4)
