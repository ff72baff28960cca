"""Layers by name, and layers that are recomputed together."""

from types import SimpleNamespace

import pytest

from hpclm.base.errors import ConfigError
from hpclm.model.stack import check_shapes, groups
from hpclm.parallel.placement import Placement


def test_weights_that_are_missing_unexpected_or_of_another_shape_are_named():
    with pytest.raises(ConfigError) as caught:
        check_shapes(
            {"a": Placement((2,)), "b": Placement((3, 4)), "d": Placement((1,))}, {"a": (4,), "c": (1,), "d": (1,)}
        )
    assert caught.value.problems == [
        "weight a has shape (4,) in the checkpoint, but this model expects (2,)",
        "the checkpoint has no weight b (expected shape (3, 4))",
        "the checkpoint has a weight c of shape (1,), which this model does not have",
    ]


@pytest.mark.parametrize("every, sizes", [(1, [1] * 7), (2, [1, 2, 2, 1, 1]), (9, [1, 5, 1])])
def test_only_blocks_are_recomputed_together(every, sizes):
    specs = [SimpleNamespace(recompute=0 < number < 6) for number in range(7)]
    found = groups(specs, every)
    assert [len(group) for group in found] == sizes and [spec for group in found for spec in group] == specs
