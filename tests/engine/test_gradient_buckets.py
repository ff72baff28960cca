"""How large the buckets are in which the native engine reduces gradients."""

import pytest
import torch
from torch import nn

from hpclm.engine.gradient_buckets import groups, megabytes
from hpclm.parallel.mesh import Axis, Mesh

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
    assert megabytes(None, values, mesh, GPU) == pytest.approx(expected)
    assert megabytes(7.5, values, mesh, GPU) == 7.5
    assert megabytes(None, values, mesh, CPU) == 25  # the order of sums on CPUs is what it was


def test_parameters_are_divided_into_buckets_from_the_last_to_the_first():
    parameters = [nn.Parameter(torch.empty(1 << 18)) for _ in range(12)]  # a megabyte each
    found = list(groups(parameters, 5))
    assert [len(group) for group in found] == [1, 5, 5, 1]
    assert [p for group in found for p in group] == parameters[::-1]
