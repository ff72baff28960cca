"""Every process saves and reads an even share of what it holds, and nothing is gathered for it."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpclm.engine.save_plan import SavePlan, among_ranks, divided
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.parallel.mesh import SINGLE, Axis, Mesh
from hpclm.parallel.placement import Placement
from tests import ranks
from tests.engine import sharded

SHAPES = [(50, 8), (8,), (24, 8), (3, 5, 2), (1,)]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_equal_parts_of_several_weights_are_cut_between_rows(parts):
    weights = [ShardedParameter("w", nn.Parameter(torch.zeros(shape)), Placement(shape)) for shape in SHAPES]
    found = divided(weights, parts, SINGLE)
    for weight, spans in zip(weights, found, strict=True):
        assert [value for low, high in spans for value in range(low, high)] == list(range(weight.count))
        row = weight.count // len(weight.parameter)
        assert all(low % row == 0 for low, _ in spans)
    sizes = [sum(spans[part][1] - spans[part][0] for spans in found) for part in range(parts)]
    assert max(sizes) <= sum(w.count for w in weights) / parts + 10


def test_small_parts_are_written_by_fewer_ranks_that_are_spread_over_all():
    weights = [ShardedParameter("w", nn.Parameter(torch.zeros(1000, 100)), Placement((1000, 100)))]
    for least, ranks_ in [
        (0, range(8)),
        (0.0125, range(8)),
        (0.025, [0, 2, 4, 6]),
        (0.04, [0, 4]),
        (1.5, [0]),
        (1e-320, range(8)),
    ]:
        [spans] = among_ranks(weights, 8, SINGLE, least)
        assert [rank for rank, (low, high) in enumerate(spans) if low < high] == list(ranks_)
        assert sum(high - low for low, high in spans) == 100_000


def test_each_value_is_saved_once_and_read_once_by_the_ranks_that_hold_it():
    """4 replicas with 2 tensor-parallel slices each: a weight that is split, one that all hold, and one that another stage saves."""
    replicas, slots = Axis(4, ranks=(0, 2, 4, 6)), Axis(2)
    saved, read = torch.zeros(3, 12, 4), torch.zeros(3, 12, 4)
    for rank in range(8):
        mesh = Mesh(tp=Axis(2, rank % 2))
        held = [Placement((12, 4), 0), Placement((12, 4)), Placement((12, 4), 1)]
        own = Axis(4, rank // 2, ranks=replicas.ranks)
        weights = [
            ShardedParameter(
                "w", nn.Parameter(torch.ones(placement.local(slots))), placement, replicas=own, duplicate=n == 2
            )
            for n, placement in enumerate(held)
        ]
        plan = SavePlan.among(weights, mesh)
        for number, weight in enumerate(weights):
            for shard in plan.shards(number, "w", weight.parameter):
                saved[number][tuple(slice(a, a + n) for a, n in zip(shard.start, shard.tensor.shape))] += 1
            low, high = plan.read[number][own.rank]
            read[number].view(-1)[low:high] += 1
    assert saved[0].eq(1).all() and saved[1].eq(1).all() and saved[2].eq(0).all()
    assert read[1].eq(2).all()  # once by the ranks of either slice


def test_tensor_parallel_ranks_without_replicas_divide_the_same_weights():
    """Of a weight without replicas, an engine may name the axis of its one process, or none."""
    saved = torch.zeros(2, 12, 4)
    for rank in range(2):
        weights = [
            ShardedParameter("w", nn.Parameter(torch.ones(12, 4)), Placement((12, 4)), replicas=replicas)
            for replicas in (SINGLE, Axis(ranks=(rank,)))
        ]
        plan = SavePlan.among(weights, Mesh(tp=Axis(2, rank)))
        for number, weight in enumerate(weights):
            for shard in plan.shards(number, "w", weight.parameter):
                saved[number][tuple(slice(a, a + n) for a, n in zip(shard.start, shard.tensor.shape))] += 1
    assert saved.eq(1).all()


class Collectives(TorchDispatchMode):
    """The names of the collectives on weights."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            self.found.append(operation.name())
        return operation(*args, **(kwargs or {}))


def shares(words):
    """The bytes that this rank saves, the collectives that it needs for that, and the bytes of its optimizer's parameters."""
    run, engine, batches, _ = sharded.made(words)
    sharded.steps(run, engine, batches, 0, 1)
    with Collectives() as collectives:
        saved = list(engine.tensors())
    return sum(shard.tensor.numel() for shard in saved), collectives.found


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["engine.name=fsdp2", "parallel.tensor=2"],
        ["engine.name=deepspeed", "engine.zero_stage=3"],
        *(
            pytest.param(words, marks=pytest.mark.whole)
            for words in (
                ["parallel.tensor=2"],
                ["engine.zero_stage=1"],
                ["engine.name=fsdp2"],
                ["engine.name=fairscale"],
                ["engine.name=deepspeed", "engine.zero_stage=0"],
                ["engine.name=deepspeed", "engine.zero_stage=1"],
            )
        ),
    ],
    ids=" ".join,
)
def test_replicas_save_equal_parts_and_gather_nothing(words):
    found = ranks.run(4, shares, ["engine.precision=fp32", "batch.micro_size=1", *words])
    sizes = [size for size, _ in found]
    assert max(sizes) <= 1.05 * sum(sizes) / 4
    assert [collectives for _, collectives in found] == [[]] * 4
