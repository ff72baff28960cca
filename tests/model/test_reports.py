"""A block that has an auxiliary loss and reports of each layer: the same in every layout and engine."""

import json

import pytest
import torch
from torch import nn

from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.base.metric_names import RESERVED
from hpclm.model.gpt import Block
from hpclm.model.reports import add_loss, report
from hpclm.parallel.collectives import copy_to_tp
from hpclm.parallel.micro_batch import MicroBatch
from tests import weights
from tests.parity import STYLES, alone, errors, train, trained

COEFFICIENT = 0.3


class Balanced(Block):
    """Two losses of its output, one of them of a weight of its own, and how large the output is, layer by layer."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.tp, self.scale = tp, nn.Parameter(torch.linspace(0.5, 1.5, config.hidden))

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        x = super().forward(x, metadata)
        report(metadata, "size", x.abs().mean(-1), by_layer=True)
        x = add_loss(metadata, x, "square", x.square().mean(-1), COEFFICIENT)
        report(metadata, "spread", self.scale.std())
        return add_loss(metadata, x, "scaled", (x * copy_to_tp(self.scale, self.tp)).square().mean(-1), 0.1)


class Fickle(Block):
    """It reports in some steps only."""

    passes = 0

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        Fickle.passes += self.training
        if Fickle.passes > 4:
            report(metadata, "late", x.mean(-1))
        return super().forward(x, metadata)


BLOCK = ["engine.precision=fp32", "model.layers=2", "model.block=tests.model.test_reports:Balanced"]
DOCUMENTS = [*STYLES["llama"], *STYLES["documents"], *BLOCK]


def test_reports_are_means_over_tokens_and_an_auxiliary_loss_has_its_gradient():
    found = trained(1, *BLOCK, steps=2)
    plain = trained(1, "engine.precision=fp32", "model.layers=2", steps=2)
    names = ["scaled", "size/block0", "size/block1", "spread", "square"]
    assert all([*values] == names for values in found["reports"]) and plain["reports"] == [{}, {}]
    assert found["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-6)  # it is no part of the loss that is logged
    assert found["losses"][1] != plain["losses"][1]
    sizes = found["reports"][0]
    assert sizes["square"] > sizes["size/block0"] ** 2 + sizes["size/block1"] ** 2  # of both layers, by Jensen
    assert sizes["spread"] == pytest.approx(
        2 * float(torch.linspace(0.5, 1.5, 32).std())
    )  # a single value, of both layers
    # of the last block's output, 0.1 mean((x s)^2): by its gradient the size of x, since it enters nothing else
    gradient = found["gradients"]["block1.scale"]
    assert (gradient > 0).all() and gradient.norm() > 0


LAYOUTS = {
    "recompute": (1, ["engine.recompute=full", "engine.recompute_every=2"]),
    "micro-batches": (1, ["batch.micro_size=2"]),
    "tensor": (2, ["parallel.tensor=2"]),
    "ZeRO 1": (2, ["engine.zero_stage=1"]),
    "fsdp2": (2, ["engine.name=fsdp2"]),
    "fairscale": (2, ["engine.name=fairscale"]),
    "DeepSpeed 1": (2, ["engine.name=deepspeed", "engine.zero_stage=1"]),
    "DeepSpeed 3": (2, ["engine.name=deepspeed", "engine.zero_stage=3"]),
    "DeepSpeed's pipeline": (2, ["engine.name=deepspeed", "parallel.pipeline=2", "batch.micro_size=2"]),
    "pipelining": (2, ["engine.name=pipelining", "parallel.pipeline=2", "batch.micro_size=2"]),
    "zero bubble, tensor": (
        4,
        ["engine.name=pipelining", "parallel.pipeline=2", "parallel.tensor=2", "batch.micro_size=2"]
        + ["parallel.schedule=zero_bubble"],
    ),
}


@pytest.mark.parametrize("size, words", LAYOUTS.values(), ids=LAYOUTS)
def test_they_are_the_same_in_every_layout_and_engine(size, words):
    wanted, found = alone(*DOCUMENTS, steps=3), trained(size, *DOCUMENTS, *words, steps=3)
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(wanted[what], rel=2e-5), what
    for ours, right in zip(found["reports"], wanted["reports"], strict=True):
        assert ours == pytest.approx(right, rel=2e-5)
    if found["gradients"]:
        assert max(errors(found["gradients"], wanted["gradients"]).values()) < 1e-5


class Plain(Block):
    """It has a module of PyTorch, and reports as TEST_REPORT says."""

    name, shape = "router", -1

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.router = nn.Linear(config.hidden, 4)

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        routed = self.router(x)
        report(metadata, Plain.name, routed.square().mean(Plain.shape))
        return super().forward(x + routed.mean(-1, keepdim=True), metadata)


PLAIN = ["engine.precision=fp32", "model.layers=2", "model.block=tests.model.test_reports:Plain"]


def test_the_weights_of_pytorch_s_modules_in_a_block_depend_on_the_seed_and_the_layer():
    first, again, other = (train([*PLAIN, f"seed={seed}"], 1) for seed in (5, 5, 6))
    weights = [{name: array for name, array, *_ in found["held"]} for found in (first, again, other)]
    name = "model.block0.router.weight"
    assert (weights[0][name] == weights[1][name]).all() and (weights[0][name] != weights[2][name]).any()
    assert (weights[0][name] != weights[0]["model.block1.router.weight"]).any()


@pytest.mark.parametrize(
    "name, shape, wrong",
    [
        *(
            (name, -1, "already uses this name")
            for name in ("loss", "step", "validation_loss", "qk_x", "my_seconds", "x/")
        ),
        ("right", (1, 2), r"values of shape \[16\]; pass one value for each token, \[16, 4\]"),
    ],
)
def test_a_report_that_would_replace_a_metric_or_is_not_of_each_token_is_refused(name, shape, wrong, monkeypatch):
    monkeypatch.setattr(Plain, "name", name)
    monkeypatch.setattr(Plain, "shape", shape)
    with pytest.raises(ConfigError, match=wrong):
        train(PLAIN, 1)


def test_the_names_of_our_own_metrics_are_reserved(tiny, tmp_path):
    words = ["optim.z_loss=0.1", "optim.guard=skip_step", "log.timers=true", "evaluate.every=2", "log.every=1"]
    assert cli.main(["train", *tiny("run", *words)]) == 0
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    names = {name for row in rows for name in row}
    assert "loss" in names and not {n for n in names if n not in RESERVED and not n.endswith("_seconds")}


def test_a_name_that_only_some_steps_report_is_refused():
    with pytest.raises(ValueError, match="reports late in some steps only"):
        trained(1, "engine.precision=fp32", "model.layers=2", "model.block=tests.model.test_reports:Fickle", steps=3)


def rebuilt(value):
    """Equal values in new containers, as FSDP, FairScale and DeepSpeed make them of a module's arguments."""
    if isinstance(value, dict):
        return {name: rebuilt(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [rebuilt(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def test_a_library_that_makes_new_containers_of_a_blocks_arguments_loses_no_report():
    stack = weights.build(config.load("debug", BLOCK).model)
    ids = torch.arange(12).view(2, 6)
    batch = MicroBatch(ids, labels=ids, weights=torch.full((2, 6), 1 / 12))
    expected = stack(batch).scalars
    for layer in stack.layers.values():
        layer.register_forward_pre_hook(lambda _, args, words: rebuilt((args, words)), with_kwargs=True)
    found = stack(batch).scalars
    assert found == expected and {"size/block0", "size/block1", "square"} <= found.keys()
