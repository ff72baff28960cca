"""Weights of which data-parallel ranks hold different parts, as experts do: of four replicas 0 and 2 have one part, 1 and 3 the other."""

import pytest
import torch
import torch.nn.functional as F

from hpclm.base.errors import ConfigError
from hpclm.engine import sharded_buckets
from hpclm.model.gpt import Block
from hpclm.model.init import InitSpec, TensorParallelModule
from hpclm.parallel.collectives import gather, scatter
from hpclm.parallel.placement import Placement
from tests import ranks
from tests.parity import assembled, errors, train, trained

RANKS = 2


class Expert(TensorParallelModule):
    """A small MLP: [t, B, C] -> [t, B, C]. ``data_ranks`` ranks have one each of as many; 1: each has all."""

    def __init__(self, config, generator, tp, data_ranks):
        super().__init__(tp)
        width, inner = config.hidden, 2 * config.hidden
        split = dict(data_dim=0, data_ranks=data_ranks)
        for name, shape, dim in (("up", (RANKS, inner, width), 1), ("down", (RANKS, width, inner), 2)):
            spec = InitSpec.normal(Placement(shape, dim, **split), 0.2, generator)
            self.register_parameter(name, self.new_parameter(name, spec))
        columns = InitSpec.normal(Placement((width, RANKS), data_dim=1, data_ranks=data_ranks), 0.2, generator)
        self.register_parameter("bias", self.new_parameter("bias", columns))

    def forward(self, x, number):
        """Expert ``number`` of those held."""
        inner = F.gelu(gather(x, self.tp) @ self.up[number].T)
        return scatter(inner @ self.down[number].T, self.tp) + self.replicated(self.bias)[:, number]


class Split(Block):
    """With the expert of this replica."""

    data_ranks = RANKS
    transient = ("passes",)

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.expert, self.passes = Expert(config, generator, tp, self.data_ranks), 0

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        self.passes += 1
        return super().forward(x + self.expert(x, self.number()), metadata)

    def number(self):
        """Of the expert for this micro-batch, of those held."""
        return 0


class Whole(Split):
    """The same model on one replica: micro-batches, which replicas take in turn, have one expert and the other in turn."""

    data_ranks = 1

    def number(self):
        """Of the expert for this micro-batch, of those held."""
        return (self.passes - 1) % RANKS


WORDS = ["engine.precision=fp32", "model.layers=2", "batch.global_size=8", "batch.micro_size=1", "optim.clip=0.1"]
BLOCK, WHOLE = (f"model.block=tests.engine.test_split_by_replica:{name}" for name in ("Split", "Whole"))
LAYOUTS = {
    "replicated": (4, []),
    "bf16 sums": (2, ["engine.bucket_mb=0.01"]),
    "ZeRO 1": (4, ["engine.zero_stage=1"]),
    "ZeRO 1 in groups": (4, ["engine.zero_stage=1", "parallel.shard=2"]),
    "fsdp2": (4, ["engine.name=fsdp2"]),
    "fsdp2 in groups": (4, ["engine.name=fsdp2", "parallel.shard=2", "engine.zero_stage=2"]),
    "tensor": (4, ["parallel.tensor=2", "engine.zero_stage=1"]),
    "pipeline": (4, ["engine.name=pipelining", "parallel.pipeline=2"]),
}


@pytest.fixture(scope="module")
def wanted():
    """What one replica with both experts learns."""
    return trained(1, *WORDS, WHOLE, steps=3)


@pytest.mark.parametrize("size, words", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_norms_and_saved_state_are_those_of_one_replica_with_both(size, words, wanted):
    found = trained(size, *WORDS, BLOCK, *words, steps=3)
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(wanted[what], rel=2e-5), what
    assert found["tensors"].keys() == wanted["tensors"].keys()
    for name, right in wanted["tensors"].items():
        assert torch.allclose(found["tensors"][name], right, rtol=1e-3, atol=1e-5), name
    if found["gradients"]:
        assert max(errors(found["gradients"], wanted["gradients"]).values()) < 1e-5


@pytest.mark.parametrize("size, words", [(4, ["engine.zero_stage=1"]), (2, ["engine.name=fsdp2"])])
def test_another_layout_resumes_and_the_same_one_to_the_last_bit(size, words, wanted):
    shard = ["engine.zero_stage=1", "parallel.shard=2"]
    half = trained(4, *WORDS, BLOCK, *shard, steps=2)
    same = trained(4, *WORDS, BLOCK, *shard, steps=3, first=2, saved=half)
    full = trained(4, *WORDS, BLOCK, *shard, steps=3)
    assert all(torch.equal(same["tensors"][name], right) for name, right in full["tensors"].items())
    other = trained(size, *WORDS, BLOCK, *words, steps=3, first=2, saved=half)
    assert other["losses"][-1] == pytest.approx(full["losses"][-1], rel=1e-6)
    assert other["norms"][-1] == pytest.approx(full["norms"][-1], rel=1e-5)
    back = trained(1, *WORDS, WHOLE, steps=3, first=2, saved=half)
    assert back["losses"][-1] == pytest.approx(wanted["losses"][-1], rel=1e-5)


def scattering(words, steps):
    """Train as on a GPU, with gradients reduce-scattered."""
    sharded_buckets.scatters = lambda device: True
    found = train(words, steps)
    return {what: found[what] for what in ("losses", "norms", "held")}


@pytest.mark.parametrize("more", [["parallel.shard=2"], []], ids=["held whole", "sharded"])
def test_reduce_scattered_gradients_are_the_same(more, wanted):
    found = ranks.run(4, scattering, [*WORDS, BLOCK, "engine.zero_stage=1", *more], 3)
    for each in found:
        assert each["losses"] == pytest.approx(wanted["losses"], rel=2e-5)
        assert each["norms"] == pytest.approx(wanted["norms"], rel=2e-5)
    assert assembled(found).keys() == wanted["tensors"].keys()


@pytest.mark.parametrize(
    "size, words, wrong",
    [
        (1, [], "splits weights over 2 data-parallel ranks, but there are 1"),
        (3, ["batch.global_size=6"], "splits weights over 2 data-parallel ranks, but there are 3"),
        (2, ["optim.name=muon"], "expert.bias is a matrix that data-parallel ranks split"),
        (2, ["engine.name=deepspeed"], "'deepspeed' does not support weights that data-parallel ranks split"),
        (2, ["engine.name=fairscale"], "'fairscale' does not support weights that data-parallel ranks split"),
    ],
)
def test_what_cannot_hold_them_is_refused(size, words, wrong):
    with pytest.raises(ConfigError, match=wrong):
        trained(size, *WORDS, BLOCK, *words, steps=1)


class Misplaced(Block):
    """It declares that tensor-parallel ranks split a weight that each of them holds whole."""

    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.scale = torch.nn.Parameter(torch.ones(config.hidden))
        self.placements = {"scale": Placement((config.hidden,), 0)}

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        return super().forward(x * self.scale, metadata)


def test_a_weight_of_another_shape_than_its_placement_says_is_refused():
    words = [*WORDS, "model.block=tests.engine.test_split_by_replica:Misplaced"]
    trained(1, *words, steps=1)
    with pytest.raises(ConfigError, match=r"block0.scale has shape \(\d+,\), but its placement gives"):
        trained(2, *words, "parallel.tensor=2", steps=1)
