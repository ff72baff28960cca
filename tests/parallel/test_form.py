import pytest
import torch

from hpclm.errors import ConfigError
from hpclm.model.draw import BAND, Initial
from hpclm.parallel.form import Form
from hpclm.parallel.mesh import ALONE, Axis


def normal(form, std, generator, tp=ALONE):
    return Initial.normal(form, std, generator).parameter(tp)


def parts(form, size):
    return [normal(form, 0.02, torch.Generator().manual_seed(7), Axis(size, rank)).detach() for rank in range(size)]


FORMS = {
    "rows": Form((24, 5), 0),
    "columns": Form((6, 24), 1),
    "gate and up": Form((48, 5), 0, parts=2),
    "many bands of rows": Form((4 * 3000, BAND // 2000), 0),
    "columns of many bands": Form((3000, 4 * (BAND // 2000)), 1),
    "one row a band": Form((4, BAND + 12), 0),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_the_parts_of_a_weight_are_what_one_process_draws(form, size):
    whole = normal(form, 0.02, torch.Generator().manual_seed(7)).detach()
    found = torch.full(form.shape, torch.nan)
    for rank, part in enumerate(parts(form, size)):
        axis = Axis(size, rank)
        assert part.shape == form.local(axis)
        for piece in form.pieces(axis):
            block = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
            assert found[block].isnan().all()
            found[block] = form.cut(part, piece)
    assert torch.equal(found, whole)


def test_each_process_holds_its_part_of_both_branches_of_a_gated_mlp():
    [first, second] = parts(Form((8, 1), 0, parts=2), 2)
    whole = normal(Form((8, 1), 0, parts=2), 0.02, torch.Generator().manual_seed(7))
    assert torch.equal(first, whole[[0, 1, 4, 5]]) and torch.equal(second, whole[[2, 3, 6, 7]])


def test_a_weight_has_the_spread_that_was_asked_for_and_no_two_bands_alike():
    weight = normal(Form((4000, 1000), 0), 0.02, torch.Generator().manual_seed(1))
    rows = BAND // 1000
    assert weight.std().item() == pytest.approx(0.02, rel=0.01) and abs(weight.mean().item()) < 1e-4
    assert not torch.equal(weight[:rows], weight[rows : 2 * rows])


def test_a_weight_that_cannot_be_split_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"\(7, 3\) does not divide by parallel.tensor=2"):
        Form((7, 3), 0).local(Axis(2, 0))
    assert Form((7, 3), 0).local(ALONE) == (7, 3)
