"""Snapshots: copies of shards that training cannot change any more, in memory that is used again."""

import pytest
import torch

from hpclm.checkpoint.staging import Arena, ShardSnapshot, file_groups, write_shards
from hpclm.engine import Shard

SHAPES = [(), (0, 3), (5,), (257, 3), (1000, 1000), (1 << 20,), (3 << 20,), (7, 1), (2000, 1500)]
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def shards(seed):
    draw = torch.Generator().manual_seed(seed)
    for number, (shape, dtype) in enumerate((shape, dtype) for shape in SHAPES for dtype in TYPES):
        tensor = torch.randint(2 if dtype == torch.bool else 1000, shape, generator=draw).to(dtype)
        yield Shard(f"t{number}", tensor, shape, (0,) * len(shape))


def test_a_snapshot_holds_every_bit_whatever_becomes_of_the_tensors_and_uses_its_memory_again():
    snapshot, places = ShardSnapshot(), []
    for seed in (0, 1):
        source = list(shards(seed))
        taken = snapshot.take(source)
        for shard in source:
            shard.tensor.zero_()
        for copy, wanted in zip(taken, shards(seed), strict=True):
            assert copy.name == wanted.name and copy.tensor.dtype == wanted.tensor.dtype
            assert torch.equal(copy.tensor, wanted.tensor)
        places.append([copy.tensor.data_ptr() for copy in taken])
    assert places[0] == places[1]


@pytest.mark.parametrize("count, size", [(300, 150_000), (40, 3 << 20), (9, 1 << 28)])
def test_an_arena_s_blocks_are_powers_of_two_and_waste_little(count, size):
    arena, blocks = Arena(), {}
    for _ in range(count):
        buffer = arena.empty(torch.empty(size, dtype=torch.int8, device="meta"))
        blocks[buffer.untyped_storage().data_ptr()] = buffer.untyped_storage().nbytes()
    assert all(block & (block - 1) == 0 for block in blocks.values())
    assert sum(blocks.values()) <= 2.1 * count * size
    if count * size > 1 << 30:
        assert sum(blocks.values()) <= 1.1 * count * size


def test_a_snapshot_follows_a_tensor_that_has_another_shape_or_type():
    snapshot = ShardSnapshot()
    for tensor in (torch.ones(4), torch.full((2, 2), 2.0), torch.full((2, 2), 3.0, dtype=torch.bfloat16)):
        [copy] = snapshot.take([Shard("t", tensor, tuple(tensor.shape), (0,))])
        assert copy.tensor.dtype == tensor.dtype and torch.equal(copy.tensor, tensor)


@pytest.mark.parametrize("sizes, groups", [([4, 4, 4], [2, 1]), ([4, 12, 4], [1, 1, 1]), ([8, 4, 4], [1, 2]), ([], [])])
def test_a_file_holds_no_more_than_its_limit_unless_one_tensor_is_larger(sizes, groups):
    shards = [Shard(f"t{n}", torch.zeros(size, dtype=torch.uint8), (size,), (0,)) for n, size in enumerate(sizes)]
    found = file_groups(shards, 8)
    assert [len(group) for group in found] == groups and [shard for group in found for shard in group] == shards


def test_what_cannot_be_written_is_told_by_its_error(tmp_path):
    odd = [Shard("t", torch.zeros(1, dtype=torch.complex64), (1,), (0,))]
    assert write_shards(tmp_path, 0, odd) == {"error": "KeyError: torch.complex64"}
    assert write_shards(tmp_path / "none", 0, list(shards(0))[:1]) == {"error": "No such file or directory"}
