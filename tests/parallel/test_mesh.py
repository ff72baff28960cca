import itertools

import pytest
import torch

from hpclm.base.errors import ConfigError
from hpclm.config import ParallelConfig
from hpclm.parallel.mesh import SINGLE, Axis, Compute, Mesh, sub_axis


def lines(axis, size, tensor, pipeline, monkeypatch):
    """Ranks of every line of an axis, as each rank sees it."""
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, *_, **__: tuple(ranks))
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    return [getattr(Mesh.build(rank, size, parallel), axis) for rank in range(size)]


@pytest.mark.parametrize("size, tensor, pipeline", [(8, 2, 2), (12, 3, 2), (6, 1, 3), (8, 8, 1), (5, 1, 1)])
def test_every_axis_divides_all_ranks_into_lines_that_agree(size, tensor, pipeline, monkeypatch):
    for name, length in dict(tp=tensor, pp=pipeline, dp=size // tensor // pipeline, model=tensor * pipeline).items():
        axes = lines(name, size, tensor, pipeline, monkeypatch)
        for rank, axis in enumerate(axes):
            assert axis.size == length
            if length > 1:
                assert axis.ranks[axis.rank] == rank
                assert all(axes[other].ranks == axis.ranks for other in axis.ranks)
        if length > 1:
            assert sorted(itertools.chain(*{axis.ranks for axis in axes})) == list(range(size))


def test_tensor_neighbours_are_next_to_each_other_and_stages_far_apart(monkeypatch):
    [first, *_] = lines("tp", 8, 2, 2, monkeypatch)
    assert first.ranks == (0, 1)
    assert lines("dp", 8, 2, 2, monkeypatch)[0].ranks == (0, 2)
    assert lines("pp", 8, 2, 2, monkeypatch)[0].ranks == (0, 4)
    assert lines("model", 8, 2, 2, monkeypatch)[0].ranks == (0, 1, 4, 5)


def test_one_process_needs_no_group():
    mesh = Mesh.build(0, 1, ParallelConfig())
    assert {mesh.pp, mesh.dp, mesh.tp, mesh.model, mesh.world} == {SINGLE}


def test_axes_of_the_same_ranks_share_a_group(monkeypatch):
    made = []
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, *_, **__: made.append(ranks) or object())
    mesh = Mesh.build(5, 8, ParallelConfig(tensor=2, pipeline=4))
    assert made == [[1, 3, 5, 7], [4, 5]] and mesh.dp == Axis(1, 0, None, (5,))


def test_weights_are_sharded_over_neighbouring_data_ranks_and_replicated_between_such_groups(monkeypatch):
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, *_, **__: tuple(ranks))
    parallel = ParallelConfig(tensor=2, shard=2)
    seen = [Mesh.build(rank, 8, parallel) for rank in range(8)]
    assert [mesh.dp.ranks for mesh in seen[:2]] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert [mesh.shard.ranks for mesh in seen] == [(0, 2), (1, 3), (0, 2), (1, 3), (4, 6), (5, 7), (4, 6), (5, 7)]
    assert [mesh.replicate.ranks for mesh in seen[:4]] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [(mesh.shard.rank, mesh.replicate.rank) for mesh in seen[::2]] == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("shard", [None, 4, 8])
def test_all_data_ranks_share_out_weights_unless_there_are_more_than_asked_for(shard, monkeypatch):
    made = []
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, *_, **__: made.append(ranks) or object())
    mesh = Mesh.build(5, 8, ParallelConfig(tensor=2, shard=shard))
    assert mesh.shard == mesh.dp and mesh.shard.group is mesh.dp.group and made == [[1, 3, 5, 7], [4, 5]]
    assert mesh.replicate == Axis(1, 0, None, (5,))


def test_a_part_of_an_axis_is_an_axis_of_those_that_ask(monkeypatch):
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, *_, **__: tuple(ranks))
    pp = Mesh.build(7, 8, ParallelConfig(tensor=2, pipeline=4)).pp
    ends = sub_axis(pp, [0, 3])
    assert (ends.size, ends.rank, ends.ranks, ends.group) == (2, 1, (1, 7), (1, 7))
    assert sub_axis(pp, [0, 1, 2, 3]) is pp


def test_weights_that_data_ranks_split_have_the_axes_of_those_that_hold_the_same_part(monkeypatch):
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, *_, **__: tuple(ranks))
    mesh = Mesh.build(5, 16, ParallelConfig(tensor=2, shard=4))
    assert (mesh.dp.rank, mesh.tp.rank, mesh.shard.ranks) == (2, 1, (1, 3, 5, 7))
    part = mesh.of_weights(2)  # of ranks 1, 5, 9 and 13 each has as much as two of the four that share out all weights
    assert (part.dp.ranks, part.dp.rank) == ((1, 5, 9, 13), 1)
    assert (part.shard.ranks, part.shard.rank, part.replicate.ranks, part.replicate.rank) == ((1, 5), 1, (5, 13), 0)
    assert (part.holders.ranks, part.holders.rank, part.holders.size) == ((0, 1, 4, 5), 3, 4)
    assert mesh.of_weights(1) is mesh and part.tp is mesh.tp
    apart = mesh.of_weights(8)  # more than share out weights: nothing is sharded
    assert (apart.dp.ranks, apart.shard.ranks, apart.replicate.ranks, apart.holders) == ((5,), (5,), (5,), mesh.tp)
    with pytest.raises(
        ConfigError, match=r"over 3 data-parallel ranks, but there are 8; .* a multiple of 3 x 2 x 1 processes"
    ):
        mesh.of_weights(3)


def test_processes_that_share_a_sequence_are_one_replica(monkeypatch):
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, *_, **__: tuple(ranks))
    seen = [Mesh.build(rank, 8, ParallelConfig(context=2, expert=4)) for rank in range(8)]
    assert [mesh.replica for mesh in seen] == [0, 0, 1, 1, 2, 2, 3, 3] and {mesh.replicas for mesh in seen} == {4}
    assert [mesh.cp.ranks for mesh in seen[::2]] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [mesh.ep.ranks for mesh in seen[::4]] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_alone_a_process_keeps_only_those_that_hold_one_copy_of_the_model_with_it(monkeypatch):
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, *_, **__: tuple(ranks))
    mesh = Mesh.build(5, 8, ParallelConfig(tensor=2, pipeline=2))
    alone = Compute(torch.device("cpu"), torch.float32, mesh).alone.mesh
    assert {alone.dp, alone.cp, alone.ep, alone.shard, alone.replicate} == {SINGLE} and alone.nodes == 1
    assert (alone.tp, alone.pp, alone.holders, alone.world) == (mesh.tp, mesh.pp, mesh.tp, mesh.model)
