"""Weights that model.freeze names, or that a block freezes itself, keep every bit; the others learn as if nothing were frozen."""

import pytest
import torch
from torch import nn

from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.checkpoint import directory
from hpclm.checkpoint.tensors import CheckpointTensors
from hpclm.launch import prechecks
from tests import parity
from tests.model.test_own_block import WORDS, Block
from tests.parity import STYLES, alone, trained

STEPS = 3
LOWER = "model.freeze=[tokens.*, block0.*, 'block1.attention.*', norm.*]"
SHAPE = ["batch.global_size=8", "batch.micro_size=2", "model.layers=2"]
EXPERTS = ["model.experts.count=4", "model.experts.per_token=2", "model.experts.ffn=16"]
EXPERTS += ["model.experts.router_choice_bias=true", "model.experts.balance_bias=0.1", "model.experts.balance_step=0.1"]


def frozen(words):
    """The names of all weights, and those that are frozen."""
    model = config.load(None, [*parity.TINY, *words]).model
    names = {name.removeprefix("model.") for name in alone(*words, steps=0)["tensors"]}
    return names, {name for name in names if model.freezes(name)}


def kept(found, words):
    """Assert that frozen weights have their first values and no state, and that all others have changed."""
    before = alone(*words, steps=0)["tensors"]
    names, fixed = frozen(words)
    assert fixed and names - fixed
    state = {name.split(".", 2)[2] for name in found["tensors"] if name.startswith("optim.")}
    assert state == {name for name in names - fixed if "choice_bias" not in name}
    for name in names:
        assert torch.equal(found["tensors"][f"model.{name}"], before[f"model.{name}"]) == (name in fixed), name


PATTERNS = {
    "first layers": ([], LOWER),
    "last layers": ([], "model.freeze=[block1.*, norm.*]"),
    "embedding": ([], "model.freeze=[tokens.*]"),
    "biases and norms": ([], "model.freeze=['*.bias', '*norm*']"),
    "output": (STYLES["llama"], "model.freeze=[output.*, 'block?.mlp.up.*']"),
    "all but the output": (STYLES["llama"], "model.freeze=[tokens.*, 'block*', norm.*]"),
    "router": (EXPERTS, "model.freeze=['block0.mlp.router.*']"),
    # without a loss that balances the experts, the inputs of the first experts have no gradient
    "all but the routers": (
        EXPERTS[:-1],
        "model.freeze=[tokens.*, entry.*, norm.*, '*.norm?.*', '*.attention.*', '*.experts.*']",
    ),
    "all but routers and outer weights of experts": (
        EXPERTS[:-1],
        "model.freeze=[tokens.*, entry.*, norm.*, '*.norm?.*', '*.attention.*', '*.experts.up*']",
    ),
    "muon": (["optim.name=muon"], LOWER),
    "guarded": (["optim.guard=clip_update"], LOWER),
    "recomputed": (["engine.recompute=full"], LOWER),
    "clipped queries and keys": (["optim.qk_clip=0.01"], "model.freeze=['block0.attention.*']"),
    "own optimizer": (["optim.name=torch.optim:RAdam", "optim.eps=1e-8", "optim.clip=0"], LOWER),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_the_gradients_of_trained_weights_are_those_without_freezing_to_the_last_bit(name):
    words, freeze = PATTERNS[name]
    words = [*SHAPE, "engine.precision=fp32", *words]
    free, found = alone(*words, steps=1), alone(*words, freeze, steps=STEPS)
    kept(found, [*words, freeze])
    assert found["losses"][0] == free["losses"][0]
    assert found["gradients"].keys() == free["gradients"].keys() - frozen([*words, freeze])[1]
    for weight, gradient in found["gradients"].items():
        assert torch.equal(gradient, free["gradients"][weight]), weight
    squares = sum(gradient.double().square().sum() for gradient in found["gradients"].values())
    assert found["norms"][0] == pytest.approx(squares.sqrt().item(), rel=1e-5)


def test_a_frozen_routers_choice_bias_does_not_move():
    words = [*SHAPE, "engine.precision=fp32", *EXPERTS, "model.freeze=['block0.mlp.router.*']"]
    tensors = alone(*words, steps=STEPS)["tensors"]
    assert not tensors["model.block0.mlp.router.choice_bias"].any()
    assert tensors["model.block1.mlp.router.choice_bias"].any()


ENGINES = {
    "native": ["engine.name=native"],
    "native, sharded": ["engine.zero_stage=1"],
    "tensor": ["parallel.tensor=2"],
    "fsdp2": ["engine.name=fsdp2"],
    "fsdp2, stage 2": ["engine.name=fsdp2", "engine.zero_stage=2"],
    "fairscale": ["engine.name=fairscale"],
    "pipelining": ["engine.name=pipelining", "parallel.pipeline=2"],
    "deepspeed 0": ["engine.name=deepspeed", "engine.zero_stage=0"],
    "deepspeed 1": ["engine.name=deepspeed"],
    "deepspeed 2": ["engine.name=deepspeed", "engine.zero_stage=2"],
    "deepspeed 3": ["engine.name=deepspeed", "engine.zero_stage=3"],
    "deepspeed's pipeline": ["engine.name=deepspeed", "parallel.pipeline=2"],
}
ALWAYS = ("native, sharded", "fsdp2", "fairscale", "deepspeed 1", "deepspeed 3")


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.whole]) for name in ENGINES]
)
def test_frozen_weights_keep_fp32_values_in_mixed_precision_and_a_run_resumes_to_the_last_bit(engine, precision):
    words = [*SHAPE, f"engine.precision={precision}", LOWER]
    straight = trained(2, *words, *ENGINES[engine], steps=2 * STEPS)
    begun = trained(2, *words, *ENGINES[engine], steps=STEPS)
    for found in (straight, begun):
        kept(found, [*words[:-2], "engine.precision=fp32", LOWER])
    resumed = trained(2, *words, *ENGINES[engine], steps=2 * STEPS, first=STEPS, saved=begun)
    assert resumed["losses"] == straight["losses"][STEPS:]
    for name, tensor in straight["tensors"].items():
        assert torch.equal(resumed["tensors"][name], tensor), name
    elsewhere = trained(1, *words, steps=2 * STEPS, first=STEPS, saved=begun)
    kept(elsewhere, [*words[:-2], "engine.precision=fp32", LOWER])
    assert elsewhere["losses"] == pytest.approx(straight["losses"][STEPS:], abs=0.03)


STAGES = ["engine.name=pipelining", "parallel.pipeline=2"]
SCHEDULES = {
    "1f1b": [],
    "gpipe": ["parallel.schedule=gpipe"],
    "interleaved": ["parallel.schedule=interleaved", "parallel.chunks=2"],
    "zero bubble": ["parallel.schedule=zero_bubble"],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("freeze", ["[tokens.*, entry.*, 'block[01].*']", "['block[23].*', norm.*, output.*]"])
def test_a_pipeline_stage_may_train_nothing(schedule, freeze):
    words = [*SHAPE[:2], "model.layers=4", "model.tied=false", "engine.precision=fp32", f"model.freeze={freeze}"]
    words.append("optim.guard=clip_update")  # which looks at all weights that a stage trains
    wanted = alone(*words, steps=2 * STEPS)
    begun = trained(2, *words, *STAGES, *SCHEDULES[schedule], steps=STEPS)
    assert begun["scalars"]["optimizer_steps"] == STEPS
    kept(begun, words)
    resumed = trained(2, *words, *STAGES, *SCHEDULES[schedule], steps=2 * STEPS, first=STEPS, saved=begun)
    assert resumed["losses"] == pytest.approx(wanted["losses"][STEPS:], abs=1e-5)
    for name, tensor in wanted["tensors"].items():
        assert (resumed["tensors"][name] - tensor).abs().max().item() < 1e-5, name


class PartlyFrozen(Block):
    """A block that freezes one of its weights."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.fixed = nn.Parameter(torch.linspace(0.5, 1.5, config.hidden), requires_grad=False)
        self.gate = nn.Parameter(torch.ones(config.hidden))

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        return super().forward(x, metadata) * (self.fixed * self.gate).to(x.dtype)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.whole])
        for name in ENGINES
        if name != "tensor"  # the block does not divide its work
    ],
)
def test_a_block_that_freezes_a_weight_itself_trains_in_every_engine(engine):
    words = [*WORDS, "model.block=tests.engine.test_freezing:PartlyFrozen", "model.freeze=[block0.gate]"]
    wanted, found = trained(1, *words, steps=STEPS), trained(2, *words, *ENGINES[engine], steps=STEPS)
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
    assert found["tensors"].keys() == wanted["tensors"].keys()
    for name in ("block0.fixed", "block1.fixed", "block0.gate"):
        assert f"optim.exp_avg.{name}" not in found["tensors"]
    for result in (wanted, found):
        assert torch.equal(result["tensors"]["model.block1.fixed"], torch.linspace(0.5, 1.5, 32))
        assert torch.equal(result["tensors"]["model.block0.gate"], torch.ones(32))
        assert not torch.equal(result["tensors"]["model.block1.gate"], torch.ones(32))


class Unaware:
    """A user's engine that does not declare that it leaves frozen weights alone."""

    def __init__(self, config, compute):
        raise AssertionError("it must not be made")

    def train_step(self, batches, lr, step, check_interrupt=None):
        """Not called."""

    evaluate = tensors = scalars = load = train_step


REFUSED = {
    "unknown": (
        ["model.freeze=[blocks0.*]"],
        r"blocks0\.\* matches no weight; weights are tokens.weight, .*Did you mean 'block0\.\*'\?",
    ),
    "tied output": (["model.freeze=[output.*]"], r"output\.\* matches no weight"),
    "everything": (["model.freeze=['*']"], "freezes every weight"),
    "its group": (
        ["model.freeze=[block0.*]", "optim.groups=[{match: block0, lr: 2}]"],
        "matches no weight that is trained",
    ),
    "a stage of deepspeed": (
        ["model.freeze=[tokens.*, entry.*, 'block[01].*']", "model.layers=4", "job.gpus=2"]
        + ["engine.name=deepspeed", "parallel.pipeline=2"],
        r"leaves nothing to train in stage 0 of the pipeline, tokens to block1, which engine 'deepspeed' does not support",
    ),
    "weights on disk": (
        ["model.freeze=[tokens.*]", "engine.name=deepspeed", "engine.zero_stage=3", "engine.offload=parameters"]
        + ["engine.offload_folder=unused"],
        "model.freeze does not work with engine.offload_folder=unused and engine.offload=parameters",
    ),
    "weights of one type": (
        ["model.freeze=[tokens.*]", "engine.name=deepspeed", "engine.zero_stage=3"]
        + ["engine.extra={zero_optimization: {use_all_reduce_for_fetch_params: true}}"],
        "model.freeze does not work with engine.extra.zero_optimization.use_all_reduce_for_fetch_params",
    ),
    "an engine that does not say so": (
        ["model.freeze=[tokens.*]", "engine.name=tests.engine.test_freezing:Unaware"],
        r"does not support model\.freeze",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_frozen_is_refused_before_the_queue(name):
    words, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        prechecks.check_submission(config.load(None, [*parity.TINY, "model.layers=2", *words, "out=unused"]), "slurm")


def final_weights(run):
    """The weights in a run's newest checkpoint."""
    folder, manifest = directory.locate(run)
    with CheckpointTensors(folder, manifest) as saved:
        return {name: saved.whole(name) for name in saved.shapes() if name.startswith("model.")}


def test_the_list_may_change_only_where_a_run_starts_from_the_weights(tiny, tmp_path, capsys):
    first = tiny("first", "model.freeze=[tokens.*]", "checkpoint.every=2")
    assert cli.main(["train", *first]) == 0
    assert " parameters, " in (log := (tmp_path / "first/log.txt").read_text()) and " of them trained; " in log
    capsys.readouterr()
    assert cli.main(["train", *tiny("first", "model.freeze=[norm.*]", "budget.steps=9")]) == 64
    assert "model.freeze was [tokens.*] and is now [norm.*]" in capsys.readouterr().err
    words = ["model.freeze=[norm.*]", f"checkpoint.init_from={tmp_path / 'first'}", "checkpoint.every=2"]
    assert cli.main(["train", *tiny("second", *words)]) == 0
    before, after = (final_weights(tmp_path / name) for name in ("first", "second"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("model.norm.")}
    assert cli.main(["convert", str(tmp_path / "second"), str(tmp_path / "exported")]) == 0
