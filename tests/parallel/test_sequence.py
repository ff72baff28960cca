"""How a sequence is divided over processes, and what a process needs of the others."""

import pytest
import torch

from hpclm.config import ModelConfig
from hpclm.model.attention.layout import Layouts, block_mask
from hpclm.model.attention.scores import Scores, attend, blocked, by_pieces, flex_attention
from hpclm.model.compiled import StackCompilation
from hpclm.model.context import Flex
from hpclm.model.dropout import dropout
from hpclm.model.position import alibi_slopes
from hpclm.parallel.mesh import SINGLE, Axis
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.parallel.sequence import SequencePart, pieces, row_blocks, take
from tests import ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_token_is_held_once_and_all_processes_have_the_same_work(size):
    length = 24 * size
    held = [take(torch.arange(length), Axis(size, rank)) for rank in range(size)]
    assert torch.equal(torch.cat(held).sort()[0], torch.arange(length))
    assert len({int((tokens + 1).sum()) for tokens in held}) == 1  # each attends to those before it and itself
    assert list(row_blocks(pieces(Axis(size, 0), length), 8)) == [
        *((at, min(at + 8, 12)) for at in (0, 8)),
        *((at, min(at + 8, length)) for at in (length - 12, length - 4)),
    ]


def gathered(size):
    """What each process sees of the whole, and the gradient of its own part, where process n weighs the whole by n + 1."""
    import torch.distributed as dist

    from hpclm.config import ParallelConfig
    from hpclm.parallel.mesh import Mesh

    mesh = Mesh.build(dist.get_rank(), size, ParallelConfig(context=size))
    assert (mesh.replicas, mesh.replica, mesh.dp.size) == (1, 0, size)
    x = torch.randn(8 * size, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = take(x.t(), mesh.cp).t().clone().requires_grad_()
    whole = SequencePart.of(mesh.cp, len(x), CPU).whole(mine)
    (whole * x.square() * (mesh.cp.rank + 1)).sum().backward()
    wanted = take(x.t(), mesh.cp).t().square() * sum(range(1, size + 1))
    return torch.equal(whole, x), torch.allclose(mine.grad, wanted)


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_all_make_the_whole_and_its_gradients_return_to_their_owners(size):
    assert ranks.run(size, gathered, size) == [(True, True)] * size


def part(rank, length, size=2):
    return SequencePart.of(Axis(size, rank), length, CPU)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("length", [48, 640])
@pytest.mark.parametrize("positions, window, several", [("rope", None, False), ("alibi", 70, True), ("rope", 9, True)])
def test_the_rows_of_a_part_see_what_they_see_of_the_whole(length, positions, window, several):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16, generator=draw) for heads in (4, 2, 2))
    layer = "full" if window is None else "window"
    config = ModelConfig.of(
        {
            "hidden": 64,
            "attention.heads": 4,
            "attention.kv_heads": 2,
            "positions": positions,
            "attention.pattern": [layer],
            "attention.window": window,
        }
    )
    documents = torch.stack([torch.arange(length) // 37, torch.arange(length) // 290]) if several else None
    how = Scores(0.3)

    def context(axis):
        layouts = Layouts(config, torch.float32, config.blocks, (SINGLE, axis), StackCompilation())
        return layouts.of(MicroBatch(torch.zeros(2, length // axis.size), documents=documents))[config.blocks[0]]

    whole = blocked(q, k, v, how, context(SINGLE))
    for rank in range(2):
        mine = part(rank, length)
        metadata = context(Axis(2, rank))
        assert torch.equal(metadata.positions[0], mine.places)
        rows = q[:, :, mine.places]
        assert (attend(rows, k, v, metadata, how) - whole[:, :, mine.places]).abs().max() < 1e-5
        halves = [x.bfloat16() for x in (rows, k, v)]
        assert (attend(*halves, metadata, how) - whole[:, :, mine.places]).abs().max() < 0.03
        slopes = alibi_slopes(4, CPU) if positions == "alibi" else None
        flex = Flex(block_mask(length, CPU, documents, window, mine), slopes, mine.places)
        assert (flex_attention(rows, k, v, flex, how) - whole[:, :, mine.places]).abs().max() < 1e-5
        if (positions, window) == ("rope", None):  # the kernels of a GPU, which a CPU replaces by a mask
            assert (by_pieces(rows, k, v, how, mine) - whole[:, :, mine.places]).abs().max() < 1e-5


def test_a_part_has_the_whole_ones_dropout_mask():
    keys, x = torch.tensor([3, 4]), torch.randn(24, 2, 8)
    whole = dropout(x, 0.5, keys, 1)
    for rank in range(3):
        mine = part(rank, 24, 3)
        for slot, places in enumerate(mine.places.chunk(2)):  # of two tensor-parallel processes
            assert torch.equal(dropout(x[places], 0.5, keys, 1, slot, mine), whole[places])


def test_pieces_are_the_first_and_the_last_of_those_that_are_left_and_rows_come_in_blocks():
    assert [pieces(Axis(2, rank), 16) for rank in range(2)] == [((0, 4), (12, 16)), ((4, 8), (8, 12))]
    assert pieces(Axis(1), 16) == ((0, 16),)
    assert list(row_blocks(((0, 4), (12, 16)), 3)) == [(0, 3), (3, 4), (12, 15), (15, 16)]
    assert list(row_blocks(((0, 4),), 4)) == [(0, 4)]
