"""Experts in all layouts: the losses, norms, gradients, balance losses, counts, biases and weights of a plain GPT in fp64, which shares no
code with hpclm."""

import functools

import numpy as np
import pytest
import torch

from hpclm import config
from hpclm.data.synthetic import synthetic
from hpclm.optim.schedules import learning_rate
from tests import parity
from tests.engine import plain_experts
from tests.parity import STYLES, TINY, trained

UPDATES = 3
EXPERTS = [
    *STYLES["llama"],
    *("engine.precision=fp32", "model.layers=3", "batch.global_size=16", "model.context=8", "optim.clip=0.5"),
    *(
        "model.experts.count=8",
        "model.experts.per_token=2",
        "model.experts.ffn=24",
        "model.experts.pattern=[dense,experts,experts]",
    ),
]
BALANCE = {
    "none": [],
    "sequence and bias": [
        "model.experts.router_score=sigmoid",
        "model.experts.router_choice_bias=true",
        "model.experts.balance_bias=0.01",
    ]
    + [
        "model.experts.balance_sequence=0.1",
        "model.experts.shared_ffn=16",
        "model.experts.router_groups=4",
        "model.experts.router_top_groups=2",
    ]
    + ["model.experts.router_scale=1.5"],
    "step": [
        "model.experts.balance_step=0.1",
        "model.experts.router_z_loss=0.01",
        "model.mlp_bias=true",
        "model.experts.router_bias=true",
    ]
    + ["model.experts.router_normalize=false", "model.activation=swiglu_clamped", "seed=1"],
    "micro-batch": ["model.experts.balance_micro_batch=0.1", "seed=3"],
    "ungated": [
        "model.positions=learned",
        "model.activation=gelu_tanh",
        "model.bias=true",
        "model.attention.qkv_bias=false",
    ]
    + ["model.experts.per_token=3", "model.tied=true", "model.experts.pattern=[experts,experts,dense]", "seed=2"],
}
PIPELINE = ["parallel.pipeline=2", "engine.name=pipelining"]
LAYOUTS = {
    "alone": (1, []),
    "expert 2": (2, ["parallel.expert=2"]),
    "expert 4": (4, ["parallel.expert=4"]),
    "replicas": (2, []),
    "replicated experts": (4, ["parallel.expert=2"]),
    "ZeRO 1": (4, ["parallel.expert=2", "engine.zero_stage=1"]),
    "ZeRO 1 in groups": (4, ["parallel.expert=2", "engine.zero_stage=1", "parallel.shard=2"]),
    "fsdp2": (4, ["parallel.expert=2", "engine.name=fsdp2"]),
    "fsdp2 whole": (2, ["engine.name=fsdp2"]),
    "fsdp2 in groups": (4, ["parallel.expert=2", "engine.name=fsdp2", "parallel.shard=2", "engine.zero_stage=2"]),
    "tensor": (2, ["parallel.tensor=2"]),
    "tensor, whole experts": (2, ["parallel.tensor=2", "parallel.split_experts=false"]),
    "tensor and expert": (4, ["parallel.tensor=2", "parallel.expert=2"]),
    "tensor and whole experts shared out": (
        4,
        ["parallel.tensor=2", "parallel.expert=2", "parallel.split_experts=false"],
    ),
    "context": (2, ["parallel.context=2", "parallel.expert=2"]),
    "context, tensor": (4, ["parallel.context=2", "parallel.expert=2", "parallel.tensor=2"]),
    "pipeline": (4, [*PIPELINE, "parallel.expert=2"]),
    "pipeline, ZeRO 1": (
        8,
        [*PIPELINE, "parallel.expert=2", "engine.zero_stage=1", "parallel.schedule=gpipe"],
    ),
    "tensor, pipeline, ZeRO 1": (8, [*PIPELINE, "parallel.expert=2", "engine.zero_stage=1", "parallel.tensor=2"]),
    "recomputed": (2, ["parallel.expert=2", "engine.recompute=full"]),
    "deepspeed": (2, ["engine.name=deepspeed"]),
    "deepspeed 1": (2, ["engine.name=deepspeed", "engine.zero_stage=1"]),
    "deepspeed 3": (2, ["engine.name=deepspeed", "engine.zero_stage=3"]),
    "deepspeed pipeline": (2, ["engine.name=deepspeed", "parallel.pipeline=2"]),
    "fairscale": (2, ["engine.name=fairscale"]),
}
OFTEN = [
    *(("alone", balance, 4, True) for balance in BALANCE),
    *(("tensor", "step", 2, True), ("recomputed", "sequence and bias", 4, False), ("expert 2", "none", 1, True)),
    *(("context", "micro-batch", 4, True), ("deepspeed", "ungated", 2, False), ("fairscale", "none", 1, True)),
    *(
        ("ZeRO 1", "none", 1, False),
        ("replicated experts", "none", 2, False),
        ("fsdp2", "sequence and bias", 2, True),
        ("pipeline", "step", 2, True),
        ("pipeline, ZeRO 1", "ungated", 1, False),
        ("tensor, pipeline, ZeRO 1", "sequence and bias", 2, True),
    ),
    *(("tensor and expert", "micro-batch", 2, False), ("tensor and whole experts shared out", "ungated", 1, True)),
]
"""Layouts, kinds of balance, sizes of micro-batches, and whether some tokens do not count: each engine, and each kind on 1, 2 and 4 ranks."""


def cases():
    """Those, and by hand each layout with each kind, of sizes and masks that take turns; and every size and mask of two layouts."""
    turns = [
        (layout, balance, (1, 2, 4)[(row + column) % 3], (row + column) % 2 == 1)
        for row, layout in enumerate(LAYOUTS)
        for column, balance in enumerate(BALANCE)
    ]
    turns += [
        (layout, balance, size, masked)
        for layout in ("alone", "expert 4")
        for balance in BALANCE
        for size in (1, 2, 4)
        for masked in (False, True)
    ]
    for case in dict.fromkeys([*OFTEN, *turns]):
        name = f"{case[0]}-{case[1]}-{case[2]}{'-masked' * case[3]}"
        yield pytest.param(*case, id=name, marks=[pytest.mark.whole] * (case not in OFTEN))


def words_of(balance, micro_size, masked):
    """Settings of a run, but for its layout."""
    return [*EXPERTS, *BALANCE[balance], f"batch.micro_size={micro_size}", f"data.eod_mask_loss={masked}".lower()]


@functools.cache
def plainly(balance, micro_size, masked):
    """What the plain GPT makes of the weights that hpclm begins with."""
    words = words_of(balance, micro_size, masked)
    run, initial = config.load(None, [*TINY, *words]), trained(1, *words, steps=0)["tensors"]
    source, size = synthetic(run.data, run.model.context, run.seed, run.model.vocab_size), run.batch.global_size
    rows = np.empty((UPDATES * size, run.model.context + 1), np.int64)
    samples = source.samples("train", 1000)
    for index, row in enumerate(rows):
        samples.read(index, row)
    tokens, labels = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])
    counted = tokens != source.eod if masked else torch.ones_like(tokens, dtype=torch.bool)
    steps = zip(tokens.split(size), labels.split(size), counted.split(size), strict=True)
    rates = [learning_rate(step, 1, parity.STEPS, run.optim) for step in range(UPDATES)]
    result = plain_experts.trained(
        {name.removeprefix("model."): weight for name, weight in initial.items()}, run, list(steps), rates
    )
    # of rounding errors in fp32, none takes another expert
    assert result["margin"] > 1e-5
    assert not masked or not counted.all()
    return result


def differences(tensors, right):
    """By name: the norm of the difference, as part of the norm of what it ought to be."""
    assert tensors.keys() == right.keys()
    return {name: ((tensors[name].double() - want).norm() / want.norm()).item() for name, want in right.items()}


@pytest.mark.parametrize("layout, balance, micro_size, masked", list(cases()))
def test_every_layout_computes_what_a_plain_loop_over_tokens_and_experts_does(layout, balance, micro_size, masked):
    size, words = LAYOUTS[layout]
    right = plainly(balance, micro_size if balance == "micro-batch" else 1, masked)
    run = trained(size, *words_of(balance, micro_size, masked), *words, steps=UPDATES)
    assert run["expert_counts"] == right["counts"]
    assert run["losses"] == pytest.approx(right["losses"], rel=1e-6)
    assert run["norms"] == pytest.approx(right["norms"], rel=1e-6)
    for step, reported in enumerate(right["reports"]):
        assert run["reports"][step] == pytest.approx(reported, rel=1e-6)
    for name, error in differences(run["tensors"], right["tensors"]).items():
        # what Adam divides by is small where a gradient nearly is 0: of weights that began at 0 more digits may differ
        assert error < (1e-5 if name.startswith("model.") and name.endswith("bias") else 1e-6), name
    if run["gradients"]:
        for name, error in differences(run["gradients"], right["gradients"]).items():
            assert error < 1e-6, name
    if balance == "step":
        assert np.allclose(run["scalars"]["expert_load"], right["load"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "layout, balance", [("expert 2", "step"), ("fsdp2", "sequence and bias"), ("pipeline, ZeRO 1", "ungated")]
)
def test_a_resumed_run_goes_on_to_the_last_bit(layout, balance):
    size, words = LAYOUTS[layout]
    words = [*words_of(balance, 1, False), *words]
    uninterrupted, saved = trained(size, *words, steps=UPDATES), trained(size, *words, steps=1)
    resumed = trained(size, *words, steps=UPDATES, first=1, saved=saved)
    assert resumed["losses"] == uninterrupted["losses"][1:]
    assert resumed["scalars"] == uninterrupted["scalars"]
    for name, tensor in uninterrupted["tensors"].items():
        assert torch.equal(tensor, resumed["tensors"][name]), name


def test_some_stages_of_a_pipeline_may_have_no_experts():
    words = [*EXPERTS, "model.layers=4", "model.experts.pattern=[dense,dense,dense,experts]", "batch.micro_size=2"]
    alone = trained(1, *words, steps=2)
    together = trained(4, *words, *LAYOUTS["pipeline"][1], steps=2)
    assert together["norms"] == pytest.approx(alone["norms"], rel=1e-6)
    assert together["expert_counts"] == alone["expert_counts"]
    assert max(differences(together["tensors"], alone["tensors"]).values()) < 1e-6


def test_a_step_that_the_guard_skips_moves_no_bias_no_load_and_no_average():
    words = [*EXPERTS, *BALANCE["sequence and bias"], "model.experts.balance_step=0.1", "optim.guard=skip_step"]
    words.append("optim.ema=0.9")
    saved = trained(1, *words, steps=1)
    saved["scalars"]["guard"] = {"name": "skip_step", "window": [[0.1, 0.1]] * 64 + [[0.2, 0.2]] * 64}
    after = trained(1, *words, steps=2, first=1, saved=saved)
    assert after["guarded"] == [1.0]
    assert after["scalars"]["expert_load"] == saved["scalars"]["expert_load"]
    for name, tensor in saved["tensors"].items():
        assert torch.equal(tensor, after["tensors"][name]), name
