"""How large the buckets are in which gradients are reduced, and when that begins in a pipeline."""

import pytest
import torch
from torch import nn

from hpclm.engine import pipelining
from hpclm.engine.gradient_buckets import GradientBuckets, grouped, megabytes
from hpclm.parallel.mesh import Axis, Compute, Mesh
from tests import ranks
from tests.engine import sharded

GPU, CPU = torch.device("cuda"), torch.device("cpu")
BILLION = 1_300_000_000


@pytest.mark.parametrize(
    "replicas, nodes, values, expected",
    [
        (8, 1, BILLION, 25),
        (4, 2, BILLION, 25),
        (16, 2, BILLION, 64),
        (128, 16, BILLION, 512),
        (512, 64, 124_000_000, 124e6 * 4 / 2**20 / 4),  # four buckets
        (512, 64, 1_000_000, 25),
    ],
)
def test_buckets_grow_with_the_replicas_on_several_nodes(replicas, nodes, values, expected):
    mesh = Mesh(dp=Axis(replicas), nodes=nodes)
    assert megabytes(None, values, Compute(GPU, torch.float32, mesh)) == pytest.approx(expected)
    assert megabytes(7.5, values, Compute(GPU, torch.float32, mesh)) == 7.5
    assert megabytes(None, values, Compute(CPU, torch.float32, mesh)) == 25  # the order of sums on CPUs is what it was


def test_parameters_are_divided_into_buckets_of_which_the_first_is_small():
    parameters = [nn.Parameter(torch.empty(1 << 18)) for _ in range(12)]  # a megabyte each
    found = list(grouped(parameters, 5))
    assert [len(group) for group in found] == [1, 5, 5, 1]
    assert [p for group in found for p in group] == parameters
    assert [len(group) for group in grouped(parameters, 5, first=5 << 20)] == [5, 5, 2]


WORDS = ["engine.name=pipelining", "parallel.pipeline=2", "model.layers=4", "batch.micro_size=1"]
WORDS += ["engine.precision=fp32", "model.hidden=32"]


def trained(words, early):
    """Losses, norms and values of the weights of three steps, buckets, and those whose reduction began before the end."""
    init, finish, begun = GradientBuckets.__init__, GradientBuckets.finish, []

    def created(self, buckets, leaves, late):
        init(self, buckets, leaves, late=late if early else set(leaves))

    def finished(self):
        begun.append((len(self.buckets), sum(bucket.work is not None for bucket in self.buckets)))
        finish(self)

    pipelining.BUCKET_MB, GradientBuckets.__init__, GradientBuckets.finish = 0.008, created, finished
    run, engine, batches, _ = sharded.made(words)
    results = sharded.steps(run, engine, batches, 0, 3)
    values = [weight.parameter.detach().numpy().tobytes() for weight in engine.weights]
    return [(result.loss, result.grad_norm) for result in results], values, begun


@pytest.mark.parametrize(
    "more, waiting",
    [
        ([], 0),
        pytest.param(["model.tied=false", "parallel.schedule=gpipe"], 0, marks=pytest.mark.whole),
        pytest.param(["parallel.schedule=interleaved", "parallel.chunks=2", "model.tied=false"], 0, marks=pytest.mark.whole),
        pytest.param(["parallel.schedule=zero_bubble", "model.tied=false"], None, marks=pytest.mark.whole),
    ],
    ids=["tied", "gpipe", "interleaved", "zero-bubble"],
)  # fmt: skip
def test_reducing_a_pipelines_gradients_early_changes_nothing_but_the_time(more, waiting):
    each = [ranks.run(4, trained, [*WORDS, *more], early) for early in (False, True)]
    for (losses, values, late), (found, same, soon) in zip(*each, strict=True):
        assert found == losses and same == values
        assert all(groups > 2 and begun == 0 for groups, begun in late)
        assert all(groups - begun == (groups if waiting is None else waiting) for groups, begun in soon)
