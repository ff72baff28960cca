"""optim.ema: the average of the weights is that of its formula to the last bit, in every engine, and can be saved and evaluated."""

import pytest
import torch

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.launch import prechecks
from tests import parity
from tests.engine.test_freezing import ENGINES
from tests.parity import trained

STEPS = 2
DECAY = 0.7
WORDS = ["batch.global_size=8", "batch.micro_size=2", "model.layers=2", f"optim.ema={DECAY}", "model.freeze=[norm.*]"]
OFFLOADED = {
    "deepspeed 2, offloaded": [*ENGINES["deepspeed 2"], "engine.offload=optimizer"],
    "deepspeed 3, offloaded": [*ENGINES["deepspeed 3"], "engine.offload=parameters"],
}
ALWAYS = ("native, sharded", "fsdp2", "fairscale", "deepspeed 2", "deepspeed 3")


def averages(found):
    """The averages in the result of a run, by the names of their weights."""
    return {
        name.replace("ema.", "model.", 1): tensor for name, tensor in found["tensors"].items() if name[:4] == "ema."
    }


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.whole]) for name in (*ENGINES, *OFFLOADED)],
)
def test_the_average_is_that_of_the_formula_to_the_last_bit_and_so_is_its_evaluation(engine, precision):
    words = [*WORDS, f"engine.precision={precision}", *(ENGINES | OFFLOADED)[engine]]
    found = trained(2, *words, steps=0)
    average = averages(found)
    assert average and all(torch.equal(tensor, found["tensors"][name]) for name, tensor in average.items())
    assert {name for name in found["tensors"] if name[:6] == "model."} - average.keys() == {
        "model.norm.weight",
        "model.norm.bias",
    }
    for step in range(STEPS):
        found = trained(2, *words, steps=step + 1, first=step, saved=found)
        average = {name: was * DECAY + found["tensors"][name] * (1 - DECAY) for name, was in average.items()}
    for name, tensor in averages(found).items():
        assert torch.equal(tensor, average[name]), name
    straight = trained(2, *words, steps=STEPS)
    assert straight["tensors"].keys() == found["tensors"].keys()
    for name, tensor in straight["tensors"].items():
        assert torch.equal(tensor, found["tensors"][name]), name
    # as weights of another run, in the same layout
    weights = {name: tensor for name, tensor in found["tensors"].items() if name[:6] == "model."} | average
    imported = {"tensors": weights, "scalars": {"optimizer_steps": 0}}
    assert found["averaged"] == trained(2, *words, steps=0, saved=imported)["evaluation"]
    assert found["averaged"] != found["evaluation"]
    elsewhere = trained(1, *WORDS, "engine.precision=fp32", steps=STEPS, first=STEPS, saved=found)
    for name, tensor in found["tensors"].items():
        assert torch.equal(tensor, elsewhere["tensors"][name]), name


OVERFLOWS = ["engine.precision=fp16", "scaler.initial=1e30", "optim.nonfinite_limit=1000"]


@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=[] if name in ("native", "deepspeed 1") else [pytest.mark.whole]) for name in ENGINES],
)
def test_a_skipped_step_leaves_the_average_unchanged(engine):
    begun = trained(2, *WORDS, "engine.precision=fp32", steps=STEPS)
    begun["scalars"]["loss_scale"] = {}
    words = [*WORDS, *OVERFLOWS, *ENGINES[engine]]
    skipped = trained(2, *words, steps=STEPS + 1, first=STEPS, saved=begun)
    assert skipped["skipped"] == [True]
    for name, tensor in averages(skipped).items():
        assert torch.equal(tensor, begun["tensors"][name.replace("model.", "ema.", 1)]), name


def test_an_average_begins_with_the_weights_and_can_be_dropped():
    words = [*WORDS, "engine.precision=fp32"]
    plain = [word for word in words if "ema" not in word]
    begun = trained(1, *plain, steps=STEPS)
    on = trained(1, *words, steps=STEPS + 1, first=STEPS, saved=begun)
    for name, tensor in averages(on).items():
        assert torch.equal(tensor, begun["tensors"][name] * DECAY + on["tensors"][name] * (1 - DECAY)), name
    off = trained(1, *plain, steps=STEPS + 1, first=STEPS, saved=on)
    assert not averages(off)


def test_experts_and_their_choice_biases():
    words = ["batch.global_size=8", "model.experts.count=4", "model.experts.per_token=2", "model.experts.ffn=16"]
    words += ["model.experts.router_choice_bias=true", "model.experts.balance_bias=0.1", "engine.precision=fp32"]
    words += ["batch.micro_size=2", f"optim.ema={DECAY}", "model.layers=2"]
    one = trained(1, *words, steps=STEPS)
    assert not [name for name in averages(one) if name.endswith("choice_bias")]
    divided = trained(2, *words, "parallel.expert=2", steps=STEPS)
    for name, tensor in averages(one).items():
        torch.testing.assert_close(averages(divided)[name], tensor, rtol=0, atol=1e-5, msg=name)


REFUSED = {
    "weights on disk": (
        ["engine.name=deepspeed", "engine.zero_stage=3", "engine.offload=optimizer", "optim.name=cpu_adam"]
        + ["engine.offload_folder=unused"],
        r"optim\.ema=0\.9 does not work with engine\.offload_folder=unused",
    ),
    "an engine that does not say so": (
        ["engine.name=tests.engine.test_freezing:Unaware"],
        r"does not support optim\.ema=0\.9",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_average_is_refused_before_the_queue(name):
    words, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        words = [*parity.TINY, "optim.ema=0.9", *words, "out=unused"]
        prechecks.check_submission(config.load(None, words), "slurm")
