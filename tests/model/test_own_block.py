"""What a block of the user's own may do: it trains alike in every engine and layout, or is refused by the name of what it does."""

import numpy as np
import pytest
import torch
from torch import nn

from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.launch import prechecks
from hpclm.model.gpt import Block
from tests import parity, ranks
from tests.engine import sharded
from tests.runs import lines

HERE = __name__
STEPS = 6
WORDS = [
    "batch.global_size=4",
    "batch.micro_size=1",
    "model.layers=2",
    "engine.precision=fp32",
    f"model.block={HERE}:LayerDrop",
]


class LayerDrop(Block):
    """In training the layer is left out of half of the micro-batches (Fan et al. 2020)."""

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        return x if self.training and torch.rand(()) < 0.5 else super().forward(x, metadata)


class Attributed(Block):
    """A block that keeps ``kept``, and changes it in training."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.kept = self.begun(config)

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        if self.training:
            self.changed()
        return super().forward(x, metadata)


class Counts(Attributed):
    """A number."""

    def begun(self, config):
        """0."""
        return 0

    def changed(self):
        """Count."""
        self.kept += 1


class Named(Counts):
    """A number on which nothing depends."""

    transient = ("kept",)


class Averages(Attributed):
    """A tensor."""

    def begun(self, config):
        """Zeros."""
        return torch.zeros(config.hidden)

    def changed(self):
        """Move it."""
        self.kept = self.kept * 0.9 + 0.1


class Buffered(Averages):
    """A buffer."""

    def begun(self, config):
        """Zeros, which take the place of the buffer's."""
        self.register_buffer("kept", None)
        return torch.zeros(config.hidden)


class Remembers(Attributed):
    """A list."""

    def begun(self, config):
        """Empty."""
        return []

    def changed(self):
        """Add to it."""
        self.kept.append(1)


class MadeLate(Averages):
    """A tensor that the first step makes."""

    def begun(self, config):
        """None: it is made in ``changed``."""

    def changed(self):
        """Make it, or move it."""
        self.moved = getattr(self, "moved", torch.ones(3)) * 0.9


class InList(Averages):
    """A tensor in a list."""

    def begun(self, config):
        """Zeros."""
        return [torch.zeros(2000)]

    def changed(self):
        """Move its middle."""
        self.kept[0][1000] += 1


class Caches(Attributed):
    """What it computes once for each mode and length."""

    def begun(self, config):
        """Empty."""
        return {}

    def changed(self):
        """Nothing: see forward."""

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        return super().forward(x, metadata) + self.kept.setdefault((len(x), self.training), torch.zeros(1))


class Normed(Block):
    """Statistics of a layer of PyTorch's, on which nothing depends."""

    transient = ("norm",)

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.norm = nn.BatchNorm1d(config.hidden, affine=False)

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        self.norm(x.detach().flatten(0, 1))
        return super().forward(x, metadata)


class Half(Block):
    """A weight that is not fp32."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.scale = nn.Parameter(torch.ones(config.hidden, dtype=torch.bfloat16))


class Scalar(Block):
    """A weight without dimensions."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.scale = nn.Parameter(torch.tensor(1.0))


class SharesWithin(Block):
    """A weight under two names."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.one = nn.Linear(config.hidden, config.hidden, bias=False)
        self.other = nn.Linear(config.hidden, config.hidden, bias=False)
        self.other.weight = self.one.weight


class Shares(Block):
    """All layers have one adapter."""

    adapter = None

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        Shares.adapter = Shares.adapter or nn.Linear(config.hidden, config.hidden, bias=False)
        self.linear = Shares.adapter


class Hooked(Block):
    """A hook on a gradient."""

    method = "register_hook"

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.gate = nn.Parameter(torch.ones(config.hidden))
        getattr(self.gate, self.method)(lambda gradient: None)


class HookedLate(Hooked):
    """A hook on an accumulated gradient."""

    method = "register_post_accumulate_grad_hook"


def assembled(parts):
    """The tensors that the ranks hold together, by name."""
    whole = {}
    for part in parts:
        for name, values, shape, start in part["held"]:
            places = tuple(slice(low, low + size) for low, size in zip(start, values.shape, strict=True))
            whole.setdefault(name, np.full(shape, np.nan, np.float32))[places] = values
    return whole


@pytest.fixture(scope="module")
def alone():
    return parity.train(WORDS, STEPS)


LAYOUTS = {
    "native": [],
    "zero1": ["engine.zero_stage=1"],
    "fsdp2": ["engine.name=fsdp2"],
    "fsdp2 recomputed": ["engine.name=fsdp2", "engine.zero_stage=2", "engine.recompute=full"],
    "fairscale": ["engine.name=fairscale"],
    "deepspeed 0": ["engine.name=deepspeed", "engine.zero_stage=0"],
    "deepspeed 1": ["engine.name=deepspeed"],
    "deepspeed 2": ["engine.name=deepspeed", "engine.zero_stage=2"],
    "deepspeed 3": ["engine.name=deepspeed", "engine.zero_stage=3"],
    "deepspeed's pipeline": ["engine.name=deepspeed", "parallel.pipeline=2"],
    "pipeline": ["engine.name=pipelining", "parallel.pipeline=2"],
    "zero bubble": ["engine.name=pipelining", "parallel.pipeline=2", "parallel.schedule=zero_bubble"],
}
SAMPLE = ("native", "fsdp2", "fairscale", "deepspeed 1", "deepspeed 3")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.whole]) for name in LAYOUTS]
)
def test_a_layer_that_only_some_replicas_use_trains_as_in_one_process(layout, alone):
    parts = ranks.run(2, parity.train, [*WORDS, *LAYOUTS[layout]], STEPS)
    assert parts[0]["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert parts[0]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    whole, right = assembled(parts), assembled([alone])
    for name in (name for name in right if name.startswith("model.")):
        assert whole[name] == pytest.approx(right[name], abs=2e-5), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.whole)])
def test_a_run_with_weights_that_missed_updates_resumes_to_the_last_bit(optimizer, precision):
    words = [*WORDS, f"engine.precision={precision}", f"optim.name={optimizer}"]
    straight, begun = parity.train(words, STEPS), parity.train(words, 2)
    saved = {name: values for name, values, _, _ in begun["held"]}, begun["scalars"]
    resumed = parity.train(words, STEPS, 2, saved)
    assert resumed["losses"] == straight["losses"][2:]
    for (name, values, _, _), (_, right, _, _) in zip(resumed["held"], straight["held"], strict=True):
        assert np.array_equal(values, right), name


REFUSED = {
    "Scalar": "block0.scale has no dimension",
    "Half": "block0.scale is torch.bfloat16; weights are fp32",
    "SharesWithin": "block0.one.weight and block0.other.weight are the same weight",
    "Shares": "block0.linear.weight and block1.linear.weight are the same weight",
    "Hooked": "block0 registers a hook",
    "HookedLate": "block0 registers a hook",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_not_every_engine_can_train_is_refused_before_the_queue(name):
    run = config.load(None, [*parity.TINY, *WORDS, f"model.block={HERE}:{name}", "out=unused"])
    with pytest.raises(ConfigError, match=REFUSED[name]):
        prechecks.check_submission(run, "slurm")


def test_a_pipeline_of_one_block_a_stage_finds_that_blocks_share_a_weight():
    words = [*WORDS, f"model.block={HERE}:Shares", *LAYOUTS["pipeline"]]
    with pytest.raises(ConfigError, match=REFUSED["Shares"]):
        ranks.run(2, parity.train, words, 1)


KEPT = ("Counts", "Averages", "Buffered", "Remembers", "MadeLate", "InList")


@pytest.mark.parametrize("name", KEPT)
def test_what_a_block_keeps_and_no_checkpoint_has_is_refused_in_the_second_step(name):
    kept = "moved" if name == "MadeLate" else "kept"
    with pytest.raises(
        ConfigError, match=rf"training changes block0\.{kept}, block1\.{kept}, which checkpoints do not save"
    ):
        parity.train([*WORDS, f"model.block={HERE}:{name}"], 2)


@pytest.mark.parametrize("name", ["Named", "Normed", "Caches"])
def test_a_block_trains_whose_caches_grow_or_that_says_what_nothing_depends_on(name, tiny):
    parity.train([*WORDS, f"model.block={HERE}:{name}"], 3)
    assert (
        cli.main(["train", *tiny("run", f"model.block={HERE}:{name}", "evaluate.every=2", "checkpoint.every=3")]) == 0
    )


class Late(Counts):
    """A number that changes from the fifth pass on."""

    def changed(self):
        """Count late."""
        self.passes = getattr(self, "passes", 0) + 1
        self.kept += self.passes > 4


def test_what_changes_later_ends_the_run_at_its_next_save(tiny, tmp_path, capsys):
    words = ["model.block=tests.model.test_own_block:Late", "budget.steps=40", "checkpoint.every=8"]
    assert cli.main(["train", *tiny("run", *words)]) == 93
    assert "training changes block0.kept" in capsys.readouterr().err
    assert len(lines(tmp_path / "run/metrics.jsonl")) <= 10


class Evaluating(Block):
    """A part of it begins in evaluation mode."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.drop = nn.Dropout(0.5).eval()

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        return self.drop(super().forward(x, metadata))


@pytest.mark.parametrize("evaluates", [False, True])
def test_every_step_is_in_training_mode_whether_an_evaluation_came_before_or_not(evaluates):
    words = ["engine.precision=fp32", "model.layers=2", "model.block=tests.model.test_own_block:Evaluating"]
    run, engine, batches, _ = sharded.made(words)
    if evaluates:
        engine.evaluate(batches.take(0, 4))
    [result] = sharded.steps(run, engine, batches, 0, 1)
    assert all(layer.drop.training for layer in engine.model.layers.values() if isinstance(layer, Evaluating))
    assert result.loss == sharded.steps(*sharded.made(words)[:3], 0, 1)[0].loss
