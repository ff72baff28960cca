"""How many samples are requested of each dataset of a blend, and in which order they come."""

import numpy as np
import pytest

from hpclm.base.errors import ConfigError
from hpclm.data import blend


@pytest.mark.parametrize(
    "policy, asked, total",
    [
        ("mcore", [337, 674], 1005),  # ceil(1.005 x 335), ceil(1.005 x 670)
        ("packed", [337, 674], 1005),
        ("bigscience", [337, 673], 1004),  # ceil(1.005 x 1004 / 3), ceil(1.005 x 1004 x 2 / 3)
        ("dse", [337, 673], 1004),
    ],
)
def test_half_a_percent_more_than_needed_is_requested_of_each_dataset(policy, asked, total):
    assert blend.shares([1.0, 2.0], 1004, policy) == (asked, total)


def test_a_blend_takes_the_dataset_that_is_furthest_behind_and_of_equals_the_first():
    made = blend.weighted([2.0, 1.0, 1.0], 8)
    assert made.which.tolist() == [0, 1, 2, 0, 0, 1, 2, 0] and made.index.tolist() == [0, 0, 0, 1, 2, 1, 1, 3]
    assert blend.counts(made, 4) == [4, 2, 2, 0]


@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 5], [1, 1, 7]])
def test_an_exhaustive_blend_has_every_sample_of_every_dataset_once(sizes):
    made = blend.exhaustive(sizes)
    assert blend.counts(made, 3) == sizes
    for number, size in enumerate(sizes):
        assert made.index[made.which == number].tolist() == list(range(size))


def test_a_blend_of_many_samples_is_the_same_in_blocks(monkeypatch):
    whole = blend.weighted([0.3, 0.7], 1000)
    monkeypatch.setattr(blend, "NUMBERS_PER_BLOCK", 14)
    parts = blend.weighted([0.3, 0.7], 1000)
    assert np.array_equal(whole.which, parts.which) and np.array_equal(whole.index, parts.index)
    assert blend.counts(parts, 2) == [300, 700]


def test_a_blend_has_as_many_datasets_as_16_bits_number():
    assert len(blend.weighted([1.0] * (2**15 - 1), 1).which) == 1
    with pytest.raises(ConfigError, match="a blend of 32768 datasets is too large: at most 32767; merge some of them"):
        blend.weighted([1.0] * 2**15, 1)
