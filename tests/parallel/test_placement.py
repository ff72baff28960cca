import pytest
import torch

from hpclm.base.errors import ConfigError
from hpclm.model.init import BAND, InitSpec
from hpclm.parallel.mesh import SINGLE, Axis
from hpclm.parallel.placement import Fused, Placement


def normal(placement, std, generator, tp=SINGLE):
    return InitSpec.normal(placement, std, generator).parameter(tp)


def parts(placement, size):
    return [
        normal(placement, 0.02, torch.Generator().manual_seed(7), Axis(size, rank)).detach() for rank in range(size)
    ]


PLACEMENTS = {
    "rows": Placement((24, 5), 0),
    "columns": Placement((6, 24), 1),
    "gate and up": Placement((48, 5), 0, Fused(1, (16, 32))),
    "many bands of rows": Placement((4 * 3000, BAND // 2000), 0),
    "columns of many bands": Placement((3000, 4 * (BAND // 2000)), 1),
    "one row a band": Placement((4, BAND + 12), 0),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_the_parts_of_a_weight_are_what_one_process_draws(placement, size):
    whole = normal(placement, 0.02, torch.Generator().manual_seed(7)).detach()
    found = torch.full(placement.shape, torch.nan)
    for rank, part in enumerate(parts(placement, size)):
        axis = Axis(size, rank)
        assert part.shape == placement.local(axis)
        for piece in placement.pieces(axis):
            block = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
            assert found[block].isnan().all()
            held = (
                part if placement.dim is None else part.narrow(placement.dim, piece.offset, piece.size[placement.dim])
            )
            found[block] = held
    assert torch.equal(found, whole)


def test_each_process_holds_its_part_of_both_branches_of_a_gated_mlp():
    [first, second] = parts(Placement((8, 1), 0, Fused(1, (4, 4))), 2)
    whole = normal(Placement((8, 1), 0, Fused(1, (4, 4))), 0.02, torch.Generator().manual_seed(7))
    assert torch.equal(first, whole[[0, 1, 4, 5]]) and torch.equal(second, whole[[2, 3, 6, 7]])


def test_a_weight_has_the_spread_that_was_asked_for_and_no_two_bands_alike():
    weight = normal(Placement((4000, 1000), 0), 0.02, torch.Generator().manual_seed(1))
    rows = BAND // 1000
    assert weight.std().item() == pytest.approx(0.02, rel=0.01) and abs(weight.mean().item()) < 1e-4
    assert not torch.equal(weight[:rows], weight[rows : 2 * rows])


def test_a_weight_that_cannot_be_split_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"\(7, 3\) is not divisible by parallel.tensor=2"):
        Placement((7, 3), 0).local(Axis(2, 0))
    assert Placement((7, 3), 0).local(SINGLE) == (7, 3)


@pytest.mark.parametrize("shape, dim, ranks", [((4, 3), 0, 2), ((3, 4), None, 2)])
def test_a_weight_that_data_ranks_cannot_split_is_refused(shape, dim, ranks):
    with pytest.raises(ConfigError, match=r"dimension 0 of a weight of shape .* over 2 data-parallel ranks"):
        Placement(shape, dim, data_ranks=ranks)


def test_of_two_data_ranks_each_holds_half_of_the_experts_and_the_next_two_hold_the_same_again():
    placement = Placement((4, 6), 1, data_ranks=2)
    held = [list(placement.pieces(Axis(2, 1), data_rank)) for data_rank in range(4)]
    assert [[(piece.start, piece.size, piece.offset) for piece in each] for each in held] == [
        [((0, 3), (2, 3), 0)],
        [((2, 3), (2, 3), 0)],
    ] * 2
    assert placement.local(Axis(2, 1)) == (2, 3)
